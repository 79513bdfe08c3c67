// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// From a ProblemSpec to tensors: requests and rows, windows, packed keys (dense or in pages), tables; and the
// argument structs.
#include "support/problem.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "support/coded_rows.h"
#include "support/exact.h"

namespace topkey::support {
namespace {

constexpr int32_t kWildPage = 1000000000;

std::vector<int64_t> draw_lens(const ProblemSpec& spec, Random& random) {
  std::vector<int64_t> lens{spec.keys};
  for (int32_t b = 1; spec.paged && b < spec.requests; ++b) lens.push_back(random.between(0, spec.keys));
  return lens;
}

std::vector<int32_t> draw_requests(const ProblemSpec& spec, Random& random) {
  std::vector<int32_t> requests;
  if (!spec.paged) return std::vector<int32_t>(static_cast<size_t>(spec.rows), 0);
  const bool uniform = spec.addressing == Addressing::next_n;
  const int64_t rows = uniform ? int64_t{spec.requests} * spec.next_n : spec.rows;
  for (int64_t r = 0; r < rows; ++r) {
    requests.push_back(
        static_cast<int32_t>(uniform ? r / spec.next_n : random.below(static_cast<uint64_t>(spec.requests))));
  }
  if (spec.addressing == Addressing::q_indptr) std::sort(requests.begin(), requests.end());
  if (spec.windows == Windows::wild && spec.addressing == Addressing::request && rows > 2) {
    requests[static_cast<size_t>(rows) - 1] = spec.requests + 5;
    requests[static_cast<size_t>(rows) - 2] = -1;
  }
  return requests;
}

struct Window {
  int64_t start, end;
};

Window random_window(int64_t len, Random& random) {
  const int64_t a = random.between(0, len), b = random.between(0, len);
  if (random.chance(0.1)) return {a, a};
  return {std::min(a, b), std::max(a, b)};
}

Window wild_window(int64_t len, Random& random) {
  constexpr int64_t kHuge = std::numeric_limits<int32_t>::max(), kLow = std::numeric_limits<int32_t>::min();
  const Window inside = random_window(len, random);
  switch (random.below(8)) {
    case 0: return {-random.between(1, 700), inside.end};
    case 1: return {inside.start, len + random.between(1, 3000)};
    case 2: return {inside.end, inside.start - random.between(0, 5)};
    case 3: return {0, kHuge};
    case 4: return {inside.start, kLow};
    case 5: return {-3, -1};
    case 6: return {len + 1, len + 20};
    default: return inside;
  }
}

/// Window of row r, the j-th of n rows of its request.
Window draw_window(const ProblemSpec& spec, int64_t len, int64_t j, int64_t n, Random& random) {
  switch (spec.windows) {
    case Windows::full: return {0, len};
    case Windows::causal: return {0, len - n + 1 + j};
    case Windows::random: return random_window(len, random);
    case Windows::wild: return wild_window(len, random);
  }
  return {0, len};
}

Array i32_array(const std::vector<int64_t>& values) {
  return Array::of(std::vector<int32_t>(values.begin(), values.end()));
}

void set_windows(Problem& p, Random& random) {
  const ProblemSpec& spec = p.spec;
  const bool per_request =
      spec.paged && spec.addressing == Addressing::next_n && spec.end_per_request && spec.next_n > 1;
  if (per_request) {
    p.end = i32_array(p.lens);
    return;
  }
  if (spec.windows == Windows::full && !spec.paged && !spec.length_not_end) return;
  std::vector<int64_t> starts, ends, lengths, of_request(p.lens.size(), 0), seen(p.lens.size(), 0);
  const auto request_of = [&](int32_t b) {
    return std::clamp<size_t>(static_cast<size_t>(std::max(0, b)), 0, p.lens.size() - 1);
  };
  for (int32_t b : p.row_request) ++of_request[request_of(b)];
  for (int32_t b : p.row_request) {
    const size_t i = request_of(b);
    const Window w = draw_window(spec, p.lens[i], seen[i]++, of_request[i], random);
    starts.push_back(w.start);
    ends.push_back(w.end);
    lengths.push_back(
        std::clamp<int64_t>(w.end - w.start, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
  }
  if (spec.windows == Windows::random || spec.windows == Windows::wild) p.start = i32_array(starts);
  (spec.length_not_end ? p.length : p.end) = i32_array(spec.length_not_end ? lengths : ends);
}

void set_requests(Problem& p) {
  const ProblemSpec& spec = p.spec;
  if (!spec.paged || spec.addressing == Addressing::next_n) return;
  if (spec.addressing == Addressing::request) {
    p.request = Array::of(p.row_request);
    return;
  }
  std::vector<int32_t> indptr;
  for (int32_t b = 0; b <= spec.requests; ++b) {
    indptr.push_back(
        static_cast<int32_t>(std::lower_bound(p.row_request.begin(), p.row_request.end(), b) - p.row_request.begin()));
  }
  p.q_indptr = Array::of(indptr);
}

void set_query(Problem& p, const CodedProblem& data) {
  const ProblemSpec& spec = p.spec;
  const DType dtype = query_dtype(spec);
  const int64_t rows = p.count(), h = spec.heads, d = spec.head_dim;
  const bool packed = spec.format == KeyFormat::mxfp4;
  p.q = Array(dtype, {rows, h, packed ? d / 2 : d});
  if (packed) p.q_scales = Array(DType::u8, {rows, h, d / 32});
  p.weights = Array(spec.weights_dtype, {rows, h});
  for (int64_t i = 0; i < rows * h; ++i) {
    const size_t at = static_cast<size_t>(i);
    pack_query(spec.format, dtype, data.q[at], element(p.q.view(), i / h, i % h),
               packed ? element(p.q_scales.view(), i / h, i % h) : nullptr);
    if (spec.weights_dtype == DType::bf16) {
      p.weights.as<uint16_t>()[i] = float_to_bf16(data.weights[at]);
    } else {
      p.weights.as<float>()[i] = data.weights[at];
    }
  }
}

/// bf16 [R,H,D] and [B,T,D], f32 [R,H], where the codes were made from something.
void set_truth(Problem& p, const CodedProblem& data) {
  if (data.q_truth.empty() || data.keys_truth.empty()) return;
  const ProblemSpec& spec = p.spec;
  const int64_t d = spec.head_dim;
  p.q_truth = Array(DType::bf16, {p.count(), spec.heads, d});
  p.keys_truth = Array(DType::bf16, {static_cast<int64_t>(p.lens.size()), spec.keys, d});
  p.weights_truth = Array(DType::f32, {p.count(), spec.heads});
  for (size_t i = 0; i < data.q_truth.size(); ++i) {
    for (int64_t j = 0; j < d; ++j)
      p.q_truth.as<uint16_t>()[static_cast<int64_t>(i) * d + j] = float_to_bf16(data.q_truth[i][j]);
    p.weights_truth.as<float>()[i] = data.weights_truth[i];
  }
  size_t next = 0;
  for (size_t b = 0; b < p.lens.size(); ++b) {
    for (int64_t t = 0; t < p.lens[b]; ++t, ++next) {
      auto* to = reinterpret_cast<uint16_t*>(element(p.keys_truth.view(), static_cast<int64_t>(b), t));
      for (int64_t j = 0; j < d; ++j) to[j] = float_to_bf16(data.keys_truth[next][j]);
    }
  }
}

void set_keys(Problem& p, const CodedProblem& data) {
  std::vector<uint8_t> values(static_cast<size_t>(value_bytes(p.spec.format, p.spec.head_dim)));
  std::vector<uint8_t> scales(static_cast<size_t>(scale_bytes(p.spec.format, p.spec.head_dim)));
  for (size_t b = 0; b < p.lens.size(); ++b) {
    for (int64_t t = 0; t < p.lens[b]; ++t) {
      pack_key(p.spec.format, data.keys[b][static_cast<size_t>(t)], values.data(), scales.data());
      p.write_key(static_cast<int64_t>(b), t, values.data(), scales.data());
    }
  }
}

}  // namespace

void allocate_dense(Problem& p, int64_t count) {
  const ProblemSpec& spec = p.spec;
  p.keys = Array(dense_dtype(spec.format), {count, dense_elements(spec.format, spec.head_dim)});
  if (is_fp8(spec.format)) p.key_scales = Array(DType::f32, {count});
  if (spec.format == KeyFormat::mxfp4) p.key_scales = Array(DType::u8, {count, spec.head_dim / 32});
}

void allocate_pages(Problem& p, Random& random) {
  const ProblemSpec& spec = p.spec;
  const int64_t size = spec.page_size, bytes = size * row_bytes(spec.format, spec.head_dim);
  const int64_t stride = spec.page_stride > 0 ? spec.page_stride : (bytes + 3) / 4 * 4;
  int64_t used = 0;
  for (int64_t len : p.lens) used += (len + size - 1) / size;
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < used + 3; ++i) ids.push_back(i);
  random.shuffle(ids);
  const auto pages = static_cast<int64_t>(ids.size());
  const Array pool(DType::u8, {(pages - 1) * stride + bytes}, static_cast<size_t>(spec.storage_offset));
  std::memset(pool.as<uint8_t>(), 0xFF, pool.bytes());  // NaN in every format, as codes or as scales
  p.pages = pool.seen_as(tensor(pool.as<uint8_t>(), DType::u8, {pages, bytes}, {stride, 1}));
  auto next = ids.begin();
  p.page_ids.clear();
  for (int64_t len : p.lens) {
    const auto end = next + (len + size - 1) / size;
    p.page_ids.emplace_back(next, end);
    next = end;
  }
}

void fill_table(Problem& p) {
  size_t longest = 0;
  for (const auto& ids : p.page_ids) longest = std::max(longest, ids.size());
  const auto columns = static_cast<int64_t>(longest) + 1, step = int64_t{p.spec.table_step};
  const int64_t lines = p.spec.table_per_row ? p.count() : static_cast<int64_t>(p.lens.size());
  const Array table(DType::i32, {lines, columns * step});
  std::fill_n(table.as<int32_t>(), table.size(), kWildPage);
  p.block_table = table.seen_as(tensor(table.as<int32_t>(), DType::i32, {lines, columns}, {columns * step, step}));
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t b = p.spec.table_per_row ? p.row_request[static_cast<size_t>(line)] : line;
    if (b < 0 || b >= static_cast<int64_t>(p.page_ids.size())) continue;
    const std::vector<int32_t>& ids = p.page_ids[static_cast<size_t>(b)];
    for (size_t c = 0; c < ids.size(); ++c) {
      std::memcpy(element(p.block_table.view(), line, static_cast<int64_t>(c)), &ids[c], sizeof ids[c]);
    }
  }
}

DType query_dtype(const ProblemSpec& spec) {
  if (spec.q_dtype != DType::none) return spec.q_dtype;
  switch (spec.format) {
    case KeyFormat::fp8: return DType::f8_e4m3fn;
    case KeyFormat::mxfp4:
    case KeyFormat::fp8_fnuz: return DType::u8;
    case KeyFormat::bf16: return DType::bf16;
    case KeyFormat::f16: return DType::f16;
    default: return DType::f32;
  }
}

Problem make_problem(const ProblemSpec& spec) {
  if (spec.exact && !exact_geometry(spec.heads, spec.head_dim)) {
    throw std::invalid_argument("support: exact inputs have at most 128 heads and 128 dims");
  }
  Random random(spec.seed * 2 + 1);
  Problem p;
  p.spec = spec;
  p.lens = draw_lens(spec, random);
  p.row_request = draw_requests(spec, random);
  const CodedProblem data = coded_problem(spec, p.lens, p.row_request);
  set_query(p, data);
  set_truth(p, data);
  set_requests(p);
  set_windows(p, random);
  if (spec.paged) {
    allocate_pages(p, random);
    fill_table(p);
  } else {
    allocate_dense(p, spec.keys);
  }
  set_keys(p, data);
  return p;
}

void Problem::read_key(int64_t b, int64_t position, uint8_t* values, uint8_t* scales) const {
  if (!keys) {
    const int32_t page = page_ids[static_cast<size_t>(b)][static_cast<size_t>(position / spec.page_size)];
    const PageLayout layout = page_layout(spec.format, spec.layout, spec.page_size, spec.head_dim);
    return read_row(layout, element(pages.view(), page), position % spec.page_size, values, scales);
  }
  std::memcpy(values, values_at(b, position), static_cast<size_t>(value_bytes(spec.format, spec.head_dim)));
  if (scales == nullptr || !key_scales) return;
  std::memcpy(scales, scales_at(b, position), static_cast<size_t>(scale_bytes(spec.format, spec.head_dim)));
}

void Problem::write_key(int64_t b, int64_t position, const uint8_t* values, const uint8_t* scales) const {
  if (!keys) {
    const int32_t page = page_ids[static_cast<size_t>(b)][static_cast<size_t>(position / spec.page_size)];
    const PageLayout layout = page_layout(spec.format, spec.layout, spec.page_size, spec.head_dim);
    return write_row(layout, element(pages.view(), page), position % spec.page_size, values, scales);
  }
  std::memcpy(values_at(b, position), values, static_cast<size_t>(value_bytes(spec.format, spec.head_dim)));
  if (scales == nullptr || !key_scales) return;
  std::memcpy(scales_at(b, position), scales, static_cast<size_t>(scale_bytes(spec.format, spec.head_dim)));
}

uint8_t* Problem::values_at(int64_t b, int64_t position) const {
  if (keys) return element(keys.view(), position);
  const int32_t page = page_ids[static_cast<size_t>(b)][static_cast<size_t>(position / spec.page_size)];
  const int64_t v = value_bytes(spec.format, spec.head_dim), g = scale_bytes(spec.format, spec.head_dim);
  return element(pages.view(), page) + position % spec.page_size * (spec.layout == Layout::planar ? v : v + g);
}

uint8_t* Problem::scales_at(int64_t b, int64_t position) const {
  if (keys) return key_scales ? element(key_scales.view(), position) : nullptr;
  const int64_t v = value_bytes(spec.format, spec.head_dim), g = scale_bytes(spec.format, spec.head_dim);
  if (g == 0) return nullptr;
  if (spec.layout == Layout::interleaved) return values_at(b, position) + v;
  const int32_t page = page_ids[static_cast<size_t>(b)][static_cast<size_t>(position / spec.page_size)];
  return element(pages.view(), page) + spec.page_size * v + position % spec.page_size * g;
}

int64_t Problem::width() const {
  if (keys) return keys.view().shape[0];
  const int64_t table = block_table.view().shape[1] * spec.page_size;
  return spec.max_len > 0 && !start ? std::min(table, spec.max_len) : table;
}

Query Problem::query() const { return {q.view(), q_scales.view(), weights.view()}; }
DenseKeys Problem::dense_keys() const { return {keys.view(), key_scales.view(), spec.format}; }

PagedKeys Problem::paged_keys() const {
  return {{pages.view(), spec.format, spec.layout, spec.page_size, spec.head_dim},
          shard,
          block_table.view(),
          spec.table_per_row};
}

Rows Problem::rows() const {
  Rows r{};
  r.count = count();
  r.end = end.view();
  r.length = length.view();
  r.start = start.view();
  r.request = request.view();
  r.q_indptr = q_indptr.view();
  if (spec.paged && spec.addressing == Addressing::next_n) r.next_n = spec.next_n;
  r.max_len = spec.max_len;
  return r;
}

MqaLogits Problem::dense_logits(const Tensor& logits, bool clean) const {
  MqaLogits a{};
  a.q = query(), a.keys = dense_keys(), a.rows = rows(), a.clean = clean, a.logits = logits;
  return a;
}

PagedMqaLogits Problem::paged_logits(const Tensor& logits, bool clean) const {
  PagedMqaLogits a{};
  a.q = query(), a.keys = paged_keys(), a.rows = rows(), a.clean = clean, a.logits = logits;
  return a;
}

MqaTopk Problem::dense_search(int32_t topk, const Selection& out) const {
  MqaTopk a{};
  a.q = query(), a.keys = dense_keys(), a.rows = rows(), a.topk = topk, a.out = out;
  return a;
}

PagedMqaTopk Problem::paged_search(int32_t topk, const Selection& out) const {
  PagedMqaTopk a{};
  a.q = query(), a.keys = paged_keys(), a.rows = rows(), a.topk = topk, a.out = out;
  return a;
}

std::string Problem::text() const {
  std::string line =
      std::string(format_name(spec.format)) + " q=" + dtype_name(query_dtype(spec)) +
      " H=" + std::to_string(spec.heads) + " D=" + std::to_string(spec.head_dim) + " rows=" + std::to_string(count()) +
      " keys=" + std::to_string(spec.keys) + " " + pattern_name(spec.pattern) + (spec.exact ? " exact" : "") +
      " windows=" + std::to_string(static_cast<int>(spec.windows)) + " seed=" + std::to_string(spec.seed);
  if (!spec.paged) return line;
  return line + " requests=" + std::to_string(spec.requests) + " page=" + std::to_string(spec.page_size) +
         " stride=" + std::to_string(pages.view().stride[0]) +
         (spec.layout == Layout::planar ? "" : std::string(" ") + layout_name(spec.layout)) +
         (spec.table_per_row ? " table_per_row" : "") +
         " addressing=" + std::to_string(static_cast<int>(spec.addressing));
}

}  // namespace topkey::support
