// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The JSON header of a safetensors file, checked as it is read: no document is built, so nesting, duplicate keys and
// size cannot hurt.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace topkey::support {

struct HeaderEntry {
  std::string dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< bytes, from the end of the header
};
struct Header {
  std::map<std::string, HeaderEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// TraceError for anything but {"name": {"dtype", "shape", "data_offsets"}, ..., "__metadata__": {string: string}}.
/// `file` stands in front of the sentence. Offsets and sizes are not yet compared.
Header parse_header(std::string_view json, const std::string& file);
std::string write_header(const Header& header);

}  // namespace topkey::support
