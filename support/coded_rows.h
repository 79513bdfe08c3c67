// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Vectors between "numbers" and "bytes of a format": element codes and scales as floats, easy to bend into a pattern
// before they are packed. Internal to problem*.cpp. The quantisers here are plain ones for test data, not the
// library's named rules.
#pragma once
#include <cstdint>
#include <vector>

#include "support/problem.h"

namespace topkey::support {

struct CodedRow {
  std::vector<float> code;   ///< D element values, before the scale
  std::vector<float> scale;  ///< fp8: 1; mxfp4, q8_0: D/32; else none
};
/// Everything of a problem but windows and paging.
struct CodedProblem {
  std::vector<std::vector<CodedRow>> keys;              ///< [request][position]
  std::vector<CodedRow> q;                              ///< [R*H]; its scale: fp8: folded into weights; mxfp4: per 32
  std::vector<float> weights;                           ///< [R*H], q scale folded in
  std::vector<std::vector<float>> keys_truth, q_truth;  ///< before quantisation, bf16 values; empty for exact data
  std::vector<float> weights_truth;
};

/// Rounds `values` into codes and scales of `format`.
CodedRow quantised(KeyFormat format, ScaleRule rule, const std::vector<float>& values);
/// Codes as they are; scales 1 (fp8: `outer`).
CodedRow coded_as(KeyFormat format, const std::vector<float>& codes, float outer);
/// Packs values to `values` and scales (fp8, mxfp4) to `scales`.
void pack_key(KeyFormat format, const CodedRow& row, uint8_t* values, uint8_t* scales);
/// Packs one q vector that meets keys of `format`; `dtype` where that leaves a choice.
void pack_query(KeyFormat format, DType dtype, const CodedRow& row, uint8_t* values, uint8_t* scales);

/// Memory for keys of p.spec: a matrix of `count` rows; or pages for p.lens at random places of a pool, and
/// p.page_ids. Then the table.
void allocate_dense(Problem& p, int64_t count);
void allocate_pages(Problem& p, Random& random);
void fill_table(Problem& p);

/// Random or exact data in the spec's pattern, for requests of these lengths and rows of these requests (< 0 or too
/// large: any).
CodedProblem coded_problem(const ProblemSpec& spec, const std::vector<int64_t>& lens,
                           const std::vector<int32_t>& row_request);

}  // namespace topkey::support
