// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// nlohmann's parser calls HeaderReader for each token; the reader accepts only what can stand at that place and throws
// otherwise.
#include "support/trace_header.h"

#include <nlohmann/json.hpp>

#include "support/trace.h"

namespace topkey::support {
namespace {

using Json = nlohmann::json;
constexpr size_t kMaxDims = 32;

class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(Header& header, const std::string& file) : header_(header), file_(file) {}

  bool null() override { return reject("null"); }
  bool boolean(bool) override { return reject("a boolean"); }
  bool number_float(double, const std::string&) override { return reject("a number that is not whole"); }
  bool binary(binary_t&) override { return reject("binary data"); }
  bool number_integer(int64_t) override { return reject("a negative number"); }  // nlohmann: only these come here
  bool number_unsigned(uint64_t value) override {
    if (at_ == At::shape) {
      if (value > INT64_MAX) fail("has an extent beyond 2^63 in its shape");
      if (entry_->shape.size() == kMaxDims) fail("has more than 32 dimensions");
      entry_->shape.push_back(static_cast<int64_t>(value));
    } else if (at_ == At::offsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry_->begin : entry_->end) = value;
    } else {
      reject("a number");
    }
    return true;
  }
  bool string(string_t& value) override {
    if (at_ == At::metadata) {
      *text_ = std::move(value);
    } else if (at_ == At::tensor && field_ == "dtype") {
      entry_->dtype = std::move(value);
    } else {
      reject("a string");
    }
    return true;
  }
  bool start_object(size_t) override {
    if (at_ == At::outside) {
      at_ = At::top;
    } else if (at_ == At::top) {
      at_ = name_ == "__metadata__" ? At::metadata : At::tensor;
      seen_ = 0;
    } else {
      reject("an object");
    }
    return true;
  }
  bool end_object() override {
    if (at_ == At::tensor && seen_ != 7) fail("must have dtype, shape and data_offsets");
    at_ = at_ == At::top ? At::outside : At::top;
    return true;
  }
  bool key(string_t& value) override {
    if (at_ == At::top) return new_name(value);
    if (at_ == At::metadata) {
      const auto [place, added] = header_.metadata.emplace(std::move(value), std::string());
      if (!added) throw TraceError(file_ + ": metadata key " + shown(place->first) + " occurs twice");
      text_ = &place->second;
      return true;
    }
    const int bit = value == "dtype" ? 1 : value == "shape" ? 2 : value == "data_offsets" ? 4 : 0;
    if (bit == 0) fail("has an unknown field " + shown(value));
    if (seen_ & bit) fail("has the field " + shown(value) + " twice");
    seen_ |= bit;
    field_ = value;
    return true;
  }
  bool start_array(size_t) override {
    if (at_ == At::tensor && field_ == "shape") {
      at_ = At::shape;
    } else if (at_ == At::tensor && field_ == "data_offsets") {
      at_ = At::offsets;
      offsets_ = 0;
    } else {
      reject("a list");
    }
    return true;
  }
  bool end_array() override {
    if (at_ == At::offsets && offsets_ != 2) fail("must have two data_offsets");
    at_ = At::tensor;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw TraceError(file_ + ": the header is no valid JSON in UTF-8 (at its byte " + std::to_string(position) + ")");
  }

 private:
  enum class At { outside, top, metadata, tensor, shape, offsets };

  bool new_name(string_t& value) {
    name_ = std::move(value);
    if (name_ == "__metadata__") {
      if (has_metadata_) throw TraceError(file_ + ": __metadata__ occurs twice");
      return has_metadata_ = true;
    }
    const auto [place, added] = header_.tensors.emplace(name_, HeaderEntry());
    if (!added) fail("occurs twice");
    entry_ = &place->second;
    return true;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw TraceError(file_ + ": tensor " + shown(name_) + " " + what);
  }
  [[noreturn]] bool reject(const std::string& token) const {
    switch (at_) {
      case At::outside: throw TraceError(file_ + ": the header must be a JSON object, got " + token);
      case At::top: throw TraceError(file_ + ": header entry " + shown(name_) + " must be an object, got " + token);
      case At::metadata: throw TraceError(file_ + ": metadata values must be strings, got " + token);
      default: fail("must have a string dtype, a shape and two data_offsets of whole numbers, got " + token);
    }
  }

  Header& header_;
  const std::string& file_;
  At at_ = At::outside;
  std::string name_, field_;
  std::string* text_ = nullptr;
  HeaderEntry* entry_ = nullptr;
  int seen_ = 0, offsets_ = 0;
  bool has_metadata_ = false;
};

}  // namespace

Header parse_header(std::string_view json, const std::string& file) {
  Header header;
  HeaderReader reader(header, file);
  Json::sax_parse(json.begin(), json.end(), &reader);
  return header;
}

std::string write_header(const Header& header) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!header.metadata.empty()) json["__metadata__"] = header.metadata;
  for (const auto& [name, entry] : header.tensors) {
    json[name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  try {
    return json.dump();
  } catch (const nlohmann::json::exception&) {
    throw TraceError("trace: names and metadata must be UTF-8");
  }
}

}  // namespace topkey::support
