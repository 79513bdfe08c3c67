// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What topkey bench times beside the searches: the operations that make keys and queries and go between tokens and
// pools. They move bytes, so each stands beside what a copy of as many bytes takes.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "sample.h"
#include "support/call.h"

namespace topkey::cli {

struct ProducerCase {
  std::string name;  ///< for the table
  Sample sample;
  bool steps = false;  ///< what a model does before quantisation: norm (keys), rope, Hadamard
};
/// quick: the same shapes, smaller, to see that all runs.
std::vector<ProducerCase> producer_cases(bool quick);

/// A case with its data, ready to be called.
struct ProducerCall {
  ProducerCase what;
  support::Call call;
  /// That must be read and written: every input once (tables of cos and sin left out), every output once.
  double bytes;
  int64_t units;  ///< rows of the call: query rows, tokens, or keys that are gathered
  std::string backend;
  Exec exec{};
  std::shared_ptr<uint8_t> workspace{};

  void run() const;
};
/// `backend` with `threads` threads.
std::shared_ptr<ProducerCall> prepare_producer(const ProducerCase& c, const std::string& backend, int threads);

}  // namespace topkey::cli
