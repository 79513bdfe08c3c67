// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A trace as a call: the argument struct of its operation over the trace's tensors, with outputs allocated here; run
// it, look at the results, write them back. And the way round: a call as a trace. docs/formats.md lists the names;
// call_fields.h is that list in code.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "support/trace.h"
#include "topkey/topkey.h"

namespace topkey::support {

/// Arguments of any operation that a trace can hold.
using CallArgs = std::variant<ExpandRows, QuantizeQ, QuantizeK, StoreK, GatherK, MqaLogits, PagedMqaLogits, Topk,
                              SelectBlocks, MqaTopk, PagedMqaTopk, MergeTopk, ToSlots, PoolK, CompressK, ExpandPools>;

struct CallOptions {
  /// Metadata that replaces the trace's: {"topk", "512"}, {"out", "indices,scores"}.
  std::map<std::string, std::string> set;
  /// A trace that asks for more output than this is refused, so that a small file cannot take the machine's memory.
  uint64_t max_output_bytes = uint64_t{8} << 30;
};

/// Movable: its arguments point into the shared trace and into its own outputs.
class Call {
 public:
  /// TraceError: an operation that is not known, a tensor that is missing or cannot be passed, a number that is none.
  /// Shapes and dtypes are judged by the library, in run().
  explicit Call(std::shared_ptr<const Trace> trace, const CallOptions& options = {});

  const std::string& op() const { return op_; }
  const CallArgs& args() const { return args_; }
  const Trace& trace() const { return *trace_; }
  const std::shared_ptr<const Trace>& shared_trace() const { return trace_; }
  /// Runs all of it, with a workspace of its own.
  void run(const Exec& exec) const;
  /// Results of run(), by their names in a trace. Where an input of the operation has that name already (topk,
  /// merge_topk): "out.scores", "out.indices".
  const std::map<std::string, TraceTensor>& outputs() const { return outputs_; }
  /// "scores" finds "out.scores" too; null when the call has no such output.
  const TraceTensor* output(const std::string& name) const;
  void write_back(Trace& trace) const;

 private:
  std::shared_ptr<const Trace> trace_;
  std::string op_;
  CallArgs args_;
  std::map<std::string, TraceTensor> outputs_;
};

/// The inputs of a call as a trace: tensors copied (row-major), numbers that are not the default, `out` naming the
/// outputs it has.
Trace trace_of(const CallArgs& args);

/// Outputs that `args` has, by their API names. `tail` and `state` are inputs too.
std::vector<std::pair<std::string, Tensor>> output_tensors(const CallArgs& args);
void run_args(const CallArgs& args, const Exec& exec);
/// Null where exec.backend (or the best one) can run it, else the reason; valid until this thread's next call.
const char* args_unsupported(const CallArgs& args, const Exec& exec);
const char* args_op(const CallArgs& args);
/// Names of the operations, in the order of the pipeline.
std::vector<std::string> operation_names();

/// safetensors' name of a dtype ("F8_E4M3"), and back (DType::none: no operation takes it; I8 is u8, bytes of codes).
const char* trace_dtype(DType dtype);
DType tensor_dtype(std::string_view trace_dtype);
/// A view of a trace's tensor, and a row-major copy of what a view shows. TraceError for a dtype that no operation
/// takes, or more than 4 dimensions.
Tensor view(const TraceTensor& tensor, const std::string& name);
TraceTensor copy_of(const Tensor& tensor);
/// A format by its name; TraceError if there is none.
KeyFormat format_by_name(const std::string& name);

}  // namespace topkey::support
