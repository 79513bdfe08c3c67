// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Any bytes as a trace file: reading it, building the call and running it on `ref` must end in a result or in a worded
// error. Seeds: a small file of each operation, fuzz/corpus/trace.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "support/call.h"
#include "support/trace.h"

namespace {
constexpr uint64_t kMaxOutput = uint64_t{1} << 20;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace topkey;
  try {
    auto trace =
        std::make_shared<support::Trace>(support::parse_trace({reinterpret_cast<const char*>(data), size}, "fuzz"));
    support::CallOptions options;
    options.max_output_bytes = kMaxOutput;
    const support::Call call(trace, options);
    Exec exec{};
    exec.backend = "ref";
    call.run(exec);
    support::trace_of(call.args());
  } catch (const support::TraceError&) {
  } catch (const Error&) {
  }
  return 0;
}
