// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Call reads its arguments with one visitor over call_fields.h, trace_of writes them with another.
#include "support/call.h"

#include <charconv>
#include <cstring>

#include "support/call_fields.h"
#include "support/call_outputs.h"
#include "support/run.h"

namespace topkey::support {
namespace {

/// Every operation, with its arguments at their defaults.
template <size_t... I>
std::vector<CallArgs> defaults(std::index_sequence<I...>) {
  return {CallArgs(std::variant_alternative_t<I, CallArgs>{})...};
}
std::vector<CallArgs> defaults() { return defaults(std::make_index_sequence<std::variant_size_v<CallArgs>>()); }

/// Pages keep their stride, which a call may depend on; what lies between them stays behind as zeros. A pool shared by
/// many layers would be mostly that: its pages are stored side by side, at the next multiple of 4 bytes, which every
/// call accepts.
TraceTensor copy_of_pages(const Tensor& pages) {
  const TraceTensor dense = copy_of(pages);
  if (pages.ndim != 2 || dense.bytes.empty()) return dense;
  const int64_t bytes = pages.shape[1];
  const int64_t stride =
      pages.stride[0] >= bytes && pages.stride[0] <= 2 * bytes ? pages.stride[0] : (bytes + 3) / 4 * 4;
  TraceTensor copy = make_tensor(dense.dtype, {pages.shape[0], stride});
  for (int64_t p = 0; p < pages.shape[0]; ++p) {
    std::memcpy(copy.bytes.data() + p * stride, dense.bytes.data() + p * bytes, static_cast<size_t>(bytes));
  }
  return copy;
}

/// Sets a field from the trace, if the trace has it.
class ReadFields {
 public:
  ReadFields(const Trace& trace, const Settings& settings) : trace_(trace), settings_(settings) {}

  void operator()(const char* name, Tensor& field) {
    if (const TraceTensor* found = trace_.find(name)) field = view(*found, name);
  }
  void operator()(const char* name, int64_t& field) { field = settings_.number(name, 0); }
  void operator()(const char* name, int32_t& field) {
    const int64_t value = settings_.number(name, 0);
    field = static_cast<int32_t>(value);
    if (field != value) throw TraceError("trace: metadata " + shown(name) + " does not fit 32 bits");
  }
  void operator()(const char* name, bool& field) {
    const std::string word = settings_.text(name, "0");
    field = word == "1" || word == "true";
    if (!field && word != "0" && word != "false") {
      throw TraceError("trace: metadata " + shown(name) + " must be 0, 1, false or true, got " + shown(word));
    }
  }
  void operator()(const char* name, float& field) {
    const std::string word = settings_.text(name, "0");
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), field);
    if (error != std::errc() || end != word.data() + word.size()) {
      throw TraceError("trace: metadata " + shown(name) + " must be a number, got " + shown(word));
    }
  }
  template <class Enum>
  void operator()(const char* name, Enum& field, Names names) {
    const std::string word = settings_.text(name, *names.begin());
    int32_t i = 0;
    std::string all;
    for (const char* candidate : names) {
      if (word == candidate) return void(field = static_cast<Enum>(i));
      all += std::string(i++ == 0 ? "" : ", ") + candidate;
    }
    throw TraceError("trace: metadata " + shown(name) + " must be one of " + all + "; got " + shown(word));
  }

 private:
  const Trace& trace_;
  const Settings& settings_;
};

/// Puts a field into the trace, unless it is absent or the default.
class WriteFields {
 public:
  explicit WriteFields(Trace& trace) : trace_(trace) {}

  void operator()(const char* name, const Tensor& field) {
    if (field.data == nullptr) return;
    trace_.tensors.insert_or_assign(name, std::strcmp(name, "cache") == 0 ? copy_of_pages(field) : copy_of(field));
  }
  void operator()(const char* name, int64_t field) {
    if (field != 0) trace_.metadata[name] = std::to_string(field);
  }
  void operator()(const char* name, int32_t field) { (*this)(name, int64_t{field}); }
  void operator()(const char* name, bool field) { (*this)(name, int64_t{field}); }
  void operator()(const char* name, float field) {
    char digits[32];
    if (field != 0)
      trace_.metadata[name] = std::string(digits, std::to_chars(digits, digits + sizeof digits, field).ptr);
  }
  template <class Enum>
  void operator()(const char* name, Enum field, Names names) {
    const auto i = static_cast<size_t>(field);
    if (i != 0 || std::strcmp(name, "format") == 0) trace_.metadata[name] = names.begin()[i];
  }

 private:
  Trace& trace_;
};

/// The Rows of arguments that have them, else null.
template <class Args>
Rows* rows_of(Args& a) {
  if constexpr (requires { a.rows; }) {
    return &a.rows;
  } else {
    return nullptr;
  }
}

/// Facts that a trace states twice must agree: a head count that is not q's is a sign of a wrong file.
void check_geometry(const Trace& trace, const Settings& settings) {
  const TraceTensor* q = trace.find("q");
  if (q != nullptr && q->shape.size() == 3 && settings.number("heads", q->shape[1]) != q->shape[1]) {
    throw TraceError("trace: metadata 'heads' says " + settings.text("heads", "") + ", tensor 'q' has " +
                     std::to_string(q->shape[1]));
  }
  const TraceTensor* cache = trace.find("cache");
  if (cache != nullptr && cache->shape.size() == 2 &&
      settings.number("page_stride", cache->shape[1]) != cache->shape[1]) {
    throw TraceError("trace: metadata 'page_stride' says " + settings.text("page_stride", "") +
                     ", a page of tensor 'cache' has " + std::to_string(cache->shape[1]) + " bytes");
  }
}

/// head_dim of a cache follows from q, where there is one.
template <class Args>
void default_head_dim(Args& a) {
  if constexpr (requires {
                  a.keys.cache.head_dim;
                  a.q.values;
                }) {
    const Tensor& q = a.q.values;
    if (a.keys.cache.head_dim == 0 && q.ndim == 3 && q.shape[2] <= INT32_MAX / 2) {
      a.keys.cache.head_dim =
          static_cast<int32_t>(a.keys.cache.format == KeyFormat::mxfp4 ? 2 * q.shape[2] : q.shape[2]);
    }
  }
}

struct DTypeName {
  DType dtype;
  const char* name;
};
// The first row of a dtype is how it is written. Some engines declare bytes of codes as I8.
constexpr DTypeName kDTypes[] = {
    {DType::f32, "F32"},      {DType::f16, "F16"}, {DType::bf16, "BF16"}, {DType::f8_e4m3fn, "F8_E4M3"},
    {DType::e8m0, "F8_E8M0"}, {DType::u8, "U8"},   {DType::u8, "I8"},     {DType::b8, "BOOL"},
    {DType::i32, "I32"},      {DType::i64, "I64"}};

/// Elements of `t` in row-major order; missing leading dimensions count as one.
void copy_elements(const Tensor& t, size_t width, std::byte* to) {
  int64_t shape[4] = {1, 1, 1, 1}, stride[4] = {};
  for (int32_t i = 0; i < t.ndim && i < 4; ++i) {
    shape[4 - t.ndim + i] = t.shape[i];
    stride[4 - t.ndim + i] = t.stride[i] * static_cast<int64_t>(width);
  }
  const auto* from = static_cast<const std::byte*>(t.data);
  for (int64_t i = 0; i < shape[0]; ++i) {
    for (int64_t j = 0; j < shape[1]; ++j) {
      for (int64_t k = 0; k < shape[2]; ++k) {
        const std::byte* row = from + i * stride[0] + j * stride[1] + k * stride[2];
        for (int64_t l = 0; l < shape[3]; ++l, to += width) std::memcpy(to, row + l * stride[3], width);
      }
    }
  }
}

}  // namespace

std::vector<std::string> operation_names() {
  std::vector<std::string> names;
  for (const CallArgs& args : defaults()) names.emplace_back(args_op(args));
  return names;
}

const char* trace_dtype(DType dtype) {
  for (const DTypeName& row : kDTypes) {
    if (row.dtype == dtype) return row.name;
  }
  return "?";
}

DType tensor_dtype(std::string_view trace_dtype) {
  for (const DTypeName& row : kDTypes) {
    if (row.name == trace_dtype) return row.dtype;
  }
  return DType::none;
}

Tensor view(const TraceTensor& tensor, const std::string& name) {
  static const std::byte kNothing{};  // present though empty: null data would mean absent
  Tensor t{};
  t.dtype = tensor_dtype(tensor.dtype);
  if (t.dtype == DType::none) {
    throw TraceError("trace: tensor " + shown(name) + " has dtype " + shown(tensor.dtype) +
                     ", which no operation takes");
  }
  if (tensor.shape.size() > 4) {
    throw TraceError("trace: tensor " + shown(name) + " must have at most 4 dimensions, got " +
                     std::to_string(tensor.shape.size()));
  }
  t.data = const_cast<std::byte*>(tensor.bytes.empty() ? &kNothing : tensor.bytes.data());
  t.ndim = static_cast<int32_t>(tensor.shape.size());
  int64_t step = 1;
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = tensor.shape[static_cast<size_t>(i)];
    t.stride[i] = step;
    if (!tensor.bytes.empty()) step *= t.shape[i];  // beside an extent of 0 the others may be huge
  }
  return t;
}

TraceTensor copy_of(const Tensor& tensor) {
  TraceTensor copy = make_tensor(trace_dtype(tensor.dtype), {tensor.shape, tensor.shape + tensor.ndim});
  if (!copy.bytes.empty()) copy_elements(tensor, static_cast<size_t>(dtype_bits(copy.dtype)) / 8, copy.bytes.data());
  return copy;
}

KeyFormat format_by_name(const std::string& name) {
  const CallOptions as_metadata{{{"format", name}}};
  const Trace nothing;
  const Settings settings(nothing, as_metadata);
  KeyFormat format{};
  ReadFields(nothing, settings)("format", format, kFormatNames);
  return format;
}

std::vector<std::pair<std::string, Tensor>> output_tensors(const CallArgs& args) {
  std::vector<std::pair<std::string, Tensor>> list;
  const auto add = [&](const char* name, const Tensor& t) {
    if (t.data != nullptr) list.emplace_back(name, t);
  };
  struct Visitor {
    decltype(add)& put;
    void operator()(const Selection& out) {
      put("indices", out.indices), put("slots", out.slots), put("scores", out.scores);
      put("counts", out.counts), put("blocks", out.blocks);
    }
    void operator()(const DenseKeys& out) { put("keys", out.values), put("key_scale", out.scales); }
    void operator()(const ExpandRows& a) {
      put("row_request", a.row_request), put("lens", a.lens), put("positions", a.positions), put("slots", a.slots);
    }
    void operator()(const ToSlots& a) { put("slots", a.slots), put("counts", a.counts); }
    void operator()(const QuantizeQ& a) {
      put("q_out", a.q_out), put("q_scales_out", a.q_scales_out), put("weights_out", a.weights_out);
    }
    void operator()(const StoreK& a) { put("cache", a.cache.pages); }
    void operator()(const QuantizeK& a) { (*this)(a.out); }
    void operator()(const GatherK& a) { (*this)(a.out); }
    void operator()(const MqaLogits& a) { put("logits", a.logits); }
    void operator()(const PagedMqaLogits& a) { put("logits", a.logits); }
    void operator()(const SelectBlocks& a) { put("blocks", a.blocks); }
    void operator()(const Topk& a) { (*this)(a.out); }
    void operator()(const MqaTopk& a) { (*this)(a.out); }
    void operator()(const PagedMqaTopk& a) { (*this)(a.out), put("block_scores", a.block_scores); }
    void operator()(const MergeTopk& a) { (*this)(a.out); }
    void operator()(const PoolK& a) { put("cache", a.cache.pages), put("tail", a.tail); }
    void operator()(const CompressK& a) { put("cache", a.cache.pages), put("state", a.state); }
    void operator()(const ExpandPools& a) { (*this)(a.out); }
  };
  std::visit(Visitor{add}, args);
  return list;
}

void run_args(const CallArgs& args, const Exec& exec) {
  std::visit([&](const auto& a) { support::run(a, exec); }, args);
}
const char* args_unsupported(const CallArgs& args, const Exec& exec) {
  return std::visit([&](const auto& a) { return support::unsupported(a, exec); }, args);
}
const char* args_op(const CallArgs& args) {
  return std::visit([](const auto& a) { return op_name(a); }, args);
}

Call::Call(std::shared_ptr<const Trace> trace, const CallOptions& options) : trace_(std::move(trace)) {
  const Settings settings(*trace_, options);
  op_ = settings.text("op", "");
  bool known = false;
  for (CallArgs& args : defaults()) {
    if (op_ != args_op(args)) continue;
    args_ = args;
    known = true;
  }
  if (!known) throw TraceError("trace: metadata 'op' must name an operation of TopKey, got " + shown(op_));

  ReadFields read(*trace_, settings);
  std::visit([&](auto& a) { fields(read, a), default_head_dim(a); }, args_);
  check_geometry(*trace_, settings);
  std::visit(
      [&](auto& a) {
        if (Rows* rows = rows_of(a); rows != nullptr && rows->count == 0) rows->count = row_count(a);
        OutputMaker(settings, options.max_output_bytes, outputs_).outputs(a);
      },
      args_);
}

void Call::run(const Exec& exec) const { run_args(args_, exec); }

const TraceTensor* Call::output(const std::string& name) const {
  const auto prefixed = outputs_.find("out." + name);
  const auto place = prefixed != outputs_.end() ? prefixed : outputs_.find(name);
  return place == outputs_.end() ? nullptr : &place->second;
}

void Call::write_back(Trace& trace) const {
  for (const auto& [name, tensor] : outputs_) trace.tensors.insert_or_assign(name, tensor);
}

Trace trace_of(const CallArgs& args) {
  Trace trace;
  trace.metadata = {{"topkey_trace", "1"}, {"op", args_op(args)}};
  WriteFields write(trace);
  std::visit(
      [&](auto a) {
        if (Rows* rows = rows_of(a); rows != nullptr && rows->count == row_count(a))
          rows->count = 0;  // follows from the tensors
        fields(write, a);
        if constexpr (requires { a.q.values; }) write("heads", a.q.values.shape[1]);
        if constexpr (requires { a.out.indices; }) {
          std::string& out = trace.metadata["out"];
          for (const auto& [name, tensor] : output_tensors(args)) out += (out.empty() ? "" : ",") + name;
          if (a.out.blocks.data != nullptr) write("num_blocks", a.out.blocks.shape[1]);
        }
        if constexpr (requires { a.blocks; }) write("num_blocks", a.blocks.shape[1]);
        if constexpr (requires { a.logits; }) {
          if (a.logits.data != nullptr) trace.metadata["logits_dtype"] = trace_dtype(a.logits.dtype);
        }
      },
      args);
  const TraceTensor* cache = trace.find("cache");
  if (cache != nullptr && cache->shape.size() == 2) write("page_stride", cache->shape[1]);
  return trace;
}

}  // namespace topkey::support
