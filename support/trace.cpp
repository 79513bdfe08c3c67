// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Reading and writing safetensors: u64 length of the header, the header (JSON), the tensors' bytes without gaps or
// overlaps.
#include "support/trace.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>

#include "support/trace_header.h"

namespace topkey::support {
namespace {

namespace fs = std::filesystem;
constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the format's own reader

/// Bytes of a tensor, or -1 when they do not fit 63 bits or are not whole.
int64_t bytes_of(int bits, const std::vector<int64_t>& shape) {
  if (std::any_of(shape.begin(), shape.end(), [](int64_t extent) { return extent < 0; })) return -1;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t total = bits;
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(total, extent, &total)) return -1;
  }
  return total % 8 != 0 ? -1 : total / 8;
}

struct Source {
  std::istream& in;
  uint64_t size;
  std::string name;

  void read(void* to, uint64_t bytes) const {
    in.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!in || static_cast<uint64_t>(in.gcount()) != bytes) throw TraceError(name + ": cannot be read to its end");
  }
};

uint64_t read_header_length(const Source& source) {
  if (source.size < 8) throw TraceError(source.name + ": too short to be a safetensors file (8 bytes at least)");
  unsigned char raw[8];
  source.read(raw, sizeof raw);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | raw[i];
  if (length > source.size - 8 || length > kMaxHeader) {
    throw TraceError(source.name + ": no safetensors file, or cut off: its header would be " + std::to_string(length) +
                     " bytes of a file of " + std::to_string(source.size));
  }
  return length;
}

/// Entries in the order of their bytes, which must follow each other without gap or overlap and fill the file.
std::vector<std::pair<std::string, HeaderEntry>> laid_out(const Header& header, uint64_t data,
                                                          const std::string& file) {
  std::vector<std::pair<std::string, HeaderEntry>> entries(header.tensors.begin(), header.tensors.end());
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.begin, a.second.end) < std::pair(b.second.begin, b.second.end);
  });
  uint64_t next = 0;
  for (const auto& [name, entry] : entries) {
    const std::string who = file + ": tensor " + shown(name) + " ";
    if (entry.end < entry.begin) throw TraceError(who + "ends before it begins");
    if (entry.end > data) throw TraceError(who + "lies beyond the end of the file (cut off?)");
    if (entry.begin < next) throw TraceError(who + "overlaps another tensor");
    if (entry.begin > next) throw TraceError(who + "leaves a gap before it");
    const int bits = dtype_bits(entry.dtype);
    if (bits == 0) throw TraceError(who + "has the unknown dtype " + shown(entry.dtype));
    if (bytes_of(bits, entry.shape) != static_cast<int64_t>(entry.end - entry.begin)) {
      throw TraceError(who + "has " + std::to_string(entry.end - entry.begin) +
                       " bytes, which is not what its shape and dtype need");
    }
    next = entry.end;
  }
  if (next != data) throw TraceError(file + ": has " + std::to_string(data - next) + " bytes that belong to no tensor");
  return entries;
}

Trace read(const Source& source) {
  const uint64_t length = read_header_length(source);
  std::string json(length, '\0');
  source.read(json.data(), length);
  Header header = parse_header(json, source.name);
  Trace trace;
  for (auto& [name, entry] : laid_out(header, source.size - 8 - length, source.name)) {
    TraceTensor tensor{std::move(entry.dtype), std::move(entry.shape), std::vector<std::byte>(entry.end - entry.begin)};
    source.read(tensor.bytes.data(), tensor.bytes.size());
    trace.tensors.emplace(name, std::move(tensor));
  }
  trace.metadata = std::move(header.metadata);
  return trace;
}

/// A new file beside the one that is meant; gone again unless commit() was reached.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path) : path_(path) {
    if (fs::exists(path) && !fs::is_regular_file(path)) throw TraceError(path + ": is not a regular file");
    temporary_ = path + ".tmp" + std::to_string(std::random_device{}());
    file_.reset(std::fopen(temporary_.c_str(), "wbx"));
    if (!file_) throw TraceError(path + ": cannot be written (" + std::strerror(errno) + ")");
  }
  ~TemporaryFile() {
    std::error_code ignored;
    if (!temporary_.empty()) fs::remove(temporary_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const void* bytes, size_t size) {
    if (size != 0 && std::fwrite(bytes, 1, size, file_.get()) != size)
      throw TraceError(path_ + ": cannot be written to its end");
  }
  void commit() {
    std::error_code failed;
    if (std::fclose(file_.release()) != 0) throw TraceError(path_ + ": cannot be written to its end");
    fs::rename(temporary_, path_, failed);
    if (failed) throw TraceError(path_ + ": cannot be written (" + failed.message() + ")");
    temporary_.clear();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_, temporary_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace

int dtype_bits(std::string_view dtype) {
  struct Row {
    std::string_view name;
    int bits;
  };
  static constexpr Row kTable[] = {{"F64", 64}, {"I64", 64},    {"U64", 64},    {"C64", 64},    {"F32", 32},
                                   {"I32", 32}, {"U32", 32},    {"F16", 16},    {"BF16", 16},   {"I16", 16},
                                   {"U16", 16}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"U8", 8},
                                   {"I8", 8},   {"BOOL", 8},    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4}};
  for (const Row& row : kTable) {
    if (row.name == dtype) return row.bits;
  }
  return 0;
}

std::string shown(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, 60)) text += c >= ' ' && c <= '~' ? c : '?';
  return text + (name.size() > 60 ? "...'" : "'");
}

int64_t TraceTensor::count() const {
  if (bytes.empty()) return 0;  // beside an extent of 0 the product of the others may not fit
  int64_t total = 1;
  for (const int64_t extent : shape) total *= extent;
  return total;
}

const TraceTensor* Trace::find(const std::string& name) const {
  const auto place = tensors.find(name);
  return place == tensors.end() ? nullptr : &place->second;
}

std::string Trace::text(const std::string& key, const std::string& fallback) const {
  const auto place = metadata.find(key);
  return place == metadata.end() ? fallback : place->second;
}

int64_t Trace::number(const std::string& key, int64_t fallback) const {
  const auto place = metadata.find(key);
  return place == metadata.end() ? fallback : whole_number(key, place->second);
}

int64_t whole_number(const std::string& key, const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw TraceError("trace: metadata " + shown(key) + " must be a whole number, got " + shown(text));
  }
  return value;
}

TraceTensor make_tensor(std::string_view dtype, std::vector<int64_t> shape, uint64_t limit) {
  const int bits = dtype_bits(dtype);
  const int64_t bytes = bits == 0 ? -1 : bytes_of(bits, shape);
  if (bytes < 0 || static_cast<uint64_t>(bytes) > limit) {
    std::string extents;
    for (const int64_t extent : shape) extents += (extents.empty() ? "" : ", ") + std::to_string(extent);
    throw TraceError("trace: a tensor of shape [" + extents + "] and dtype " + std::string(dtype) +
                     " cannot be made or is too large");
  }
  return {std::string(dtype), std::move(shape), std::vector<std::byte>(static_cast<size_t>(bytes))};
}

Trace read_trace(const std::string& path) {
  std::error_code failed;
  if (!fs::is_regular_file(path, failed)) {
    throw TraceError(path + (fs::exists(path, failed) ? ": is not a regular file" : ": there is no such file"));
  }
  const uint64_t size = fs::file_size(path, failed);
  std::ifstream in(path, std::ios::binary);
  if (failed || !in) throw TraceError(path + ": cannot be opened");
  return read({in, size, path});
}

Trace parse_trace(std::string_view bytes, const std::string& name) {
  std::istringstream in{std::string(bytes)};
  return read({in, bytes.size(), name});
}

void write_trace(const std::string& path, const Trace& trace) {
  std::vector<const std::pair<const std::string, TraceTensor>*> order;
  for (const auto& item : trace.tensors) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return dtype_bits(a->second.dtype) > dtype_bits(b->second.dtype);
  });
  Header header{{}, trace.metadata};
  uint64_t offset = 0;
  for (const auto* item : order) {
    const TraceTensor& tensor = item->second;
    const uint64_t end = offset + tensor.bytes.size();
    header.tensors.emplace(item->first, HeaderEntry{tensor.dtype, tensor.shape, offset, end});
    offset = end;
  }
  std::string json = write_header(header);
  json.resize((json.size() + 7) / 8 * 8, ' ');  // the data begin at a multiple of 8
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(json.size() >> (8 * i));

  TemporaryFile file(path);
  file.write(length, sizeof length);
  file.write(json.data(), json.size());
  for (const auto* item : order) file.write(item->second.bytes.data(), item->second.bytes.size());
  file.commit();
}

}  // namespace topkey::support
