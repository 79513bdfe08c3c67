// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One call, held against everything that is known about it, on one backend: the four comparisons of docs/numerics.md
// against an oracle that shares no code with the library, the call again (same bits), the reference (exact inputs: same
// bits), the trace's own expected_* (reference: same bits). Producers are held against second ways to the same bytes.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/call.h"
#include "support/compare.h"
#include "support/trace.h"

namespace topkey::cli {

struct Finding {
  std::string backend;
  support::Report report;
  std::string skipped;  ///< why the backend did not run it; report is then empty
};

/// `rows`: at most so many query rows, evenly spaced (0: as many as about a minute allows). Errors of the library or
/// the trace throw.
std::vector<Finding> check_trace(const std::shared_ptr<const support::Trace>& trace,
                                 const std::vector<std::string>& backends, int64_t rows);

/// Outputs of finished producers against a second formulation; empty for other operations (check_producers.cpp). The
/// trace has what an operation that goes on from a state found there; stats: what the call counted, from zero.
std::vector<support::Report> check_producer(const support::CallArgs& args, const support::Trace& trace,
                                            const Exec& exec, const uint64_t* stats);

}  // namespace topkey::cli
