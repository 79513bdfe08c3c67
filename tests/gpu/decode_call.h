// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The decode call that engines make most (fp8 keys in pages, a row a request, positions alone wanted), small to describe:
// a shape, lengths, absent pages, and a pattern that the keys' scales follow, so that equal codes give scores of that
// pattern. Beside support/problem.h: any pattern with exact scores, pages that rows share, thousands of calls a second.
#pragma once
#include <string>
#include <vector>

#include "support/array.h"
#include "support/patterns.h"
#include "topkey/topkey.h"

namespace topkey::testing {

/// What the scales of keys 0, 1, ... follow: a support::Pattern, or one of these.
enum Scales : int32_t {
  kFirstOfDecode = support::kNumPatterns,
  kTwoValues = kFirstOfDecode,
  kBimodal,
  kOutlier,    ///< one key far above all others
  kFewNans,    ///< and all others normal
  kAllNans,    ///< but one in a thousand
  kTieRun,     ///< some winners at random places; the k-th best is inside a long run of equals side by side
  kTiny,       ///< products are subnormal
  kHuge,       ///< products overflow
  kSteps,      ///< 64 keys side by side are equal
  kOddBlocks,  ///< a tenth of all runs of 64 keys stands far above or far below the others
  kNumScales,
};
std::string scales_name(int32_t scales);

enum class Codes : int32_t {
  equal,   ///< all keys alike: a row's scores are its number times the scales
  exact,   ///< small integers
  normal,  ///< as quantised keys look
};
/// Of the rows.
enum class Lengths : int32_t {
  equal,
  ragged,
  edges,     ///< 0, 1, 63, 64, 65, about topk, whole, negative, beyond the table
  one_long,  ///< the others have a hundredth
};
/// Pages that the table does not have: negative ids, and ids past the cache.
enum class Holes : int32_t { none, some, first, last, most, rows };

struct DecodeCase {
  int64_t rows = 1, context = 1000;  ///< context: keys that the longest row has
  int32_t next_n = 0;                ///< rows of a request (0: one), which share a row of the table
  bool of_requests = false;          ///< ends are those of the requests' newest rows
  int32_t topk = 64, heads = 32, page_size = 64;
  int32_t scales = 0;
  Codes codes = Codes::equal;
  Lengths lengths = Lengths::equal;
  Holes holes = Holes::none;
  int64_t spare = 0;                         ///< keys that the table is wider than the context
  int64_t max_len = 0;                       ///< of the call
  bool length_form = false, padded = false;  ///< `length` instead of `end`; strides wider than what they hold
  int32_t page_gap = 0;                      ///< bytes behind each page, besides: a multiple of 4
  bool scored = false;                       ///< scores are wanted, too: behind all indices
  Fill fill = Fill::minus_one;
  int32_t max_sms = 0;  ///< 0 = as the environment says
  uint64_t seed = 1;
  std::string text() const;
};

/// Host memory of a case.
struct DecodeData {
  support::Array q, weights, pages, table, ends;
};
DecodeData make_data(const DecodeCase& c);
/// Lengths for the turn-th call with the same other memory.
void draw_ends(const DecodeCase& c, uint64_t turn, int32_t* ends);
/// How many ends the call is given.
int64_t ends_in(const DecodeCase& c);
/// Which of them is a row's.
int64_t end_of(const DecodeCase& c, int64_t row);
/// Columns from one row of indices to the next.
int64_t step_of(const DecodeCase& c);
/// Elements of the whole output, indices and then scores.
size_t outputs_of(const DecodeCase& c);

/// The call over such memory, on the host or on a device.
struct DecodeViews {
  Tensor q, weights, pages, table, ends;
};
PagedMqaTopk call_over(const DecodeCase& c, const DecodeViews& views, void* indices);

}  // namespace topkey::testing
