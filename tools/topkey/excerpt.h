// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What a selection means in words: pieces of the trace's text around the best positions of one query row, chosen tokens
// marked.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "study.h"
#include "support/call.h"

namespace topkey::cli {

struct Chosen {
  int64_t position;
  float score;
};
/// What row `row` of a finished search chose, best first. The call must have indices and scores.
std::vector<Chosen> chosen_by(const support::Call& call, int64_t row, const Window& window);
/// The trace's tokens, metadata `text`: a JSON array with a string for each key position; empty when there is none.
/// TraceError for anything else.
std::vector<std::string> tokens_of(const support::Trace& trace);

/// Lines of at most 100 columns: the text before the query, where in the context the chosen positions lie, `pieces`
/// pieces of text around the best of them, and as many around the best that lie far back. `colour`: chosen tokens are
/// set in bold too.
std::vector<std::string> excerpt(const std::vector<std::string>& tokens, const std::vector<Chosen>& chosen,
                                 const Window& window, int pieces, bool colour);

}  // namespace topkey::cli
