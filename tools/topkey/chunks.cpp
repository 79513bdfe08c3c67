// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Cutting is pointer arithmetic on every tensor that has a row for each query row.
#include "chunks.h"

#include <algorithm>
#include <type_traits>

#include "support/array.h"
#include "support/run.h"

namespace topkey::cli {
namespace {

struct Cutter {
  int64_t first, count, next_n;

  void operator()(Rows& rows) const {
    // With next_n, `end` may have an entry a request.
    if (rows.end.data != nullptr && rows.end.shape[0] < rows.count) {
      cut_tensor(rows.end, first / next_n, count / next_n);
    } else {
      cut_tensor(rows.end, first, count);
    }
    cut_tensor(rows.length, first, count);
    cut_tensor(rows.start, first, count);
    cut_tensor(rows.request, first, count);
    rows.count = count;
  }
  /// A table has a line a query row, or a line a request; without explicit requests, row r belongs to request r /
  /// next_n.
  void table(Tensor& t, bool per_row, bool explicit_requests) const {
    if (t.data == nullptr) return;
    if (per_row) return cut_tensor(t, first, count);
    if (!explicit_requests) cut_tensor(t, first / next_n, std::min(count / next_n, t.shape[0] - first / next_n));
  }
  void operator()(Selection& out, bool explicit_requests) const {
    for (Tensor* t : {&out.indices, &out.slots, &out.scores, &out.counts, &out.blocks, &out.index_base})
      cut_tensor(*t, first, count);
    table(out.slot_map.block_table, out.slot_map.table_per_row, explicit_requests);
  }
};

template <class Args>
void cut_args(Args& a, const Cutter& cutter) {
  const bool explicit_requests = a.rows.request.data != nullptr;
  if constexpr (requires { a.q; }) {
    for (Tensor* t : {&a.q.values, &a.q.scales, &a.q.weights}) cut_tensor(*t, cutter.first, cutter.count);
  } else {
    cut_tensor(a.scores, cutter.first, cutter.count);
    cut_tensor(a.row_topk, cutter.first, cutter.count);
  }
  if constexpr (requires { a.keys.block_table; })
    cutter.table(a.keys.block_table, a.keys.table_per_row, explicit_requests);
  if constexpr (requires { a.admit; }) {
    cut_tensor(a.admit.candidates, cutter.first, cutter.count);
    cut_tensor(a.admit.mask, cutter.first, cutter.count);
  }
  if constexpr (requires { a.whole_start; }) {
    for (Tensor* t : {&a.whole_start, &a.whole_end, &a.block_scores}) cut_tensor(*t, cutter.first, cutter.count);
  }
  if constexpr (requires { a.mask; }) cut_tensor(a.mask, cutter.first, cutter.count);
  if constexpr (requires { a.logits; }) cut_tensor(a.logits, cutter.first, cutter.count);
  if constexpr (requires { a.out; }) cutter(a.out, explicit_requests);
  cutter(a.rows);
}

template <class Args>
constexpr bool kCuttable =
    std::is_same_v<Args, MqaLogits> || std::is_same_v<Args, PagedMqaLogits> || std::is_same_v<Args, MqaTopk> ||
    std::is_same_v<Args, PagedMqaTopk> || std::is_same_v<Args, Topk>;

}  // namespace

void cut_tensor(Tensor& t, int64_t first, int64_t count) {
  if (t.data == nullptr) return;
  t.data = static_cast<std::byte*>(t.data) + first * t.stride[0] * static_cast<int64_t>(support::dtype_bytes(t.dtype));
  t.shape[0] = count;
}

int64_t row_step(const support::CallArgs& args) {
  return std::visit(
      [](const auto& a) -> int64_t {
        if constexpr (kCuttable<std::decay_t<decltype(a)>>) return std::max<int64_t>(1, a.rows.next_n);
        return 1;
      },
      args);
}

int64_t rows_to_cut(const support::CallArgs& args) {
  return std::visit(
      [](const auto& a) -> int64_t {
        if constexpr (kCuttable<std::decay_t<decltype(a)>>) return a.rows.q_indptr.data == nullptr ? a.rows.count : 0;
        return 0;
      },
      args);
}

support::CallArgs cut_rows(const support::CallArgs& args, int64_t first, int64_t count) {
  support::CallArgs piece = args;
  std::visit(
      [&](auto& a) {
        if constexpr (kCuttable<std::decay_t<decltype(a)>>) cut_args(a, Cutter{first, count, row_step(args)});
      },
      piece);
  return piece;
}

void run_with_progress(const support::CallArgs& args, const Exec& exec, const char* what) {
  constexpr int64_t kPieces = 64;
  const int64_t rows = rows_to_cut(args), step = row_step(args);
  Progress bar(what, rows);
  if (!bar.visible() || rows < 2 * step || rows % step != 0) return support::run_args(args, exec);
  // Throws on wrong arguments. Must come first: a cut makes shapes of its own, which would hide a tensor that is too
  // short.
  std::visit([&](const auto& a) { support::workspace_bytes(a, exec); }, args);
  const int64_t piece = std::max(step, rows / kPieces / step * step);
  for (int64_t first = 0; first < rows; first += piece) {
    support::run_args(cut_rows(args, first, std::min(piece, rows - first)), exec);
    bar.at(first + piece);
  }
}

}  // namespace topkey::cli
