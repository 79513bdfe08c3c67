// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Bytes to a topk call on every usable host backend: scores as raw bits, windows, counts, admission, order, fill.
// Every result is held against the independent full sort, every output has guards; a difference aborts with the
// report.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "support/array.h"
#include "support/compare.h"
#include "support/run.h"
#include "topkey/topkey.h"

namespace {
using namespace topkey;
using namespace topkey::support;

/// The input, read from the front; zeros once it is used up.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  template <class T>
  T take() {
    T value{};
    const size_t count = std::min(sizeof value, size_);
    std::memcpy(&value, data_, count);
    data_ += count, size_ -= count;
    return value;
  }
  int32_t below(int32_t n) { return take<uint8_t>() % n; }
  bool flag() { return (take<uint8_t>() & 1) != 0; }
  /// Mostly near the columns, sometimes any int32.
  int32_t position() { return flag() && flag() ? take<int32_t>() : take<int8_t>(); }
  void fill(const Array& array) {
    const size_t count = std::min(array.bytes(), size_);
    if (count > 0) std::memcpy(array.as<uint8_t>(), data_, count);
    data_ += count, size_ -= count;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

Array positions(Bytes& bytes, int64_t count, int32_t lowest, int32_t highest = INT32_MAX) {
  const Array array(DType::i32, {count});
  for (int64_t i = 0; i < count; ++i) array.as<int32_t>()[i] = std::clamp(bytes.position(), lowest, highest);
  return array;
}

/// A call and all that it borrows.
struct Call {
  Array scores, start, end, length, row_topk, candidates, mask, base;
  Guarded indices, values, counts, blocks;
  Topk args{};
};

void read_windows(Bytes& bytes, Call& c) {
  const int64_t rows = c.args.rows.count;
  // A row has at most 2^31-1 keys.
  if (bytes.flag()) c.start = positions(bytes, rows, -1000);
  if (bytes.flag()) {
    if (bytes.flag()) {
      c.end = positions(bytes, rows, INT32_MIN, INT32_MAX - 1000);
    } else {
      c.length = positions(bytes, rows, INT32_MIN);
    }
  }
  if (bytes.flag()) c.row_topk = positions(bytes, rows, INT32_MIN);
  if (bytes.flag()) c.args.rows.max_len = bytes.below(70);
  c.args.rows.start = c.start.view(), c.args.rows.end = c.end.view(), c.args.rows.length = c.length.view();
  c.args.row_topk = c.row_topk.view();
}

void read_admission(Bytes& bytes, Call& c, int64_t columns) {
  const int64_t rows = c.args.rows.count;
  Admit& admit = c.args.admit;
  if (bytes.flag()) {
    admit.candidate_block_size = 1 + bytes.below(9);
    const int64_t width = 1 + bytes.below(6);
    c.candidates = positions(bytes, rows * width, INT32_MIN);
    admit.candidates = tensor(c.candidates.as<int32_t>(), DType::i32, {rows, width});
  }
  if (bytes.flag()) {
    const DType dtype = bytes.flag() ? DType::b8 : bytes.flag() ? DType::f32 : DType::f16;
    c.mask = Array(dtype, {rows, columns});
    bytes.fill(c.mask);
    admit.mask = c.mask.view();
  }
  if (bytes.flag()) admit.force_first = bytes.below(5), admit.force_last = bytes.below(5);
}

void read_outputs(Bytes& bytes, Call& c) {
  const int64_t rows = c.args.rows.count;
  Selection& out = c.args.out;
  c.indices = Guarded(DType::i32, rows, c.args.topk);
  out.indices = c.indices.view();
  if (bytes.flag()) c.values = Guarded(DType::f32, rows, c.args.topk);
  if (bytes.flag()) c.counts = Guarded(DType::i32, rows, -1);
  if (bytes.flag()) {
    out.block_size = 1 + bytes.below(9);
    c.blocks = Guarded(DType::i32, rows, 1 + bytes.below(5));
  }
  out.scores = c.values.view(), out.counts = c.counts.view(), out.blocks = c.blocks.view();
  // Answers are i32: a base that lifts them past that is the caller's mistake, of which nothing is promised.
  if (bytes.flag()) c.base = positions(bytes, rows, -1000, INT32_MAX - 2000), out.index_base = c.base.view();
  out.order = static_cast<Order>(bytes.below(3));
  out.fill = static_cast<Fill>(bytes.below(3));
  out.fill_value = bytes.take<int8_t>();
}

Call read_call(Bytes& bytes) {
  static constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
  Call c;
  const int64_t columns = bytes.below(65);
  c.args.rows.count = bytes.below(4);
  c.args.topk = 1 + bytes.below(70);
  const DType dtype = kDTypes[bytes.below(3)];
  read_windows(bytes, c);
  read_admission(bytes, c, columns);
  read_outputs(bytes, c);
  c.scores = Array(dtype, {c.args.rows.count, columns});
  bytes.fill(c.scores);
  c.args.scores = c.scores.view();
  return c;
}

void stop(const std::string& backend, const std::string& why) {
  std::fprintf(stderr, "topk of %s: %s\n", backend.c_str(), why.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  const Call c = read_call(bytes);
  for (const BackendInfo& backend : backends()) {
    if (!backend.unusable.empty() || backend.device != Device::cpu) continue;
    uint64_t stats[kNumStats] = {};
    Exec exec{};
    exec.backend = backend.name.c_str();
    exec.stats = stats;
    run(c.args, exec);  // every call that read_call makes is a right one: an Error is a finding
    const Report report = compare_selection(c.args, stats);
    if (!report.ok) stop(backend.name, report.text());
    for (const Guarded* guard : {&c.indices, &c.values, &c.counts, &c.blocks}) {
      if (!*guard) continue;
      if (const std::string touched = guard->touched_outside(); !touched.empty()) stop(backend.name, touched);
    }
  }
  return 0;
}
