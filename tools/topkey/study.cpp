// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Attention row by row; nothing of size [rows, keys] is ever held.
#include "study.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "chunks.h"
#include "support/oracle.h"

namespace topkey::cli {
namespace {

constexpr int64_t kWork = 4'000'000'000;  // multiply-adds, some seconds
constexpr int64_t kSmallest = 64, kLargest = 2048;

/// The truth of a trace: q [R,H,D], keys [B,T,D], laid out so that the inner loop runs over keys.
class Attention {
 public:
  Attention(const Tensor& q, const Tensor& keys)
      : q_(q),
        heads_(q.shape[1]),
        head_dim_(q.shape[2]),
        requests_(keys.ndim == 3 ? keys.shape[0] : 1),
        width_(keys.shape[keys.ndim - 2]),
        keys_(static_cast<size_t>(requests_ * head_dim_ * width_)) {
    for (int64_t b = 0; b < requests_; ++b) {
      for (int64_t n = 0; n < width_; ++n) {
        for (int64_t d = 0; d < head_dim_; ++d) {
          const float value = keys.ndim == 3 ? support::float_at(keys, b, n, d) : support::float_at(keys, n, d);
          keys_[static_cast<size_t>((b * head_dim_ + d) * width_ + n)] = value;
        }
      }
    }
  }

  int64_t work(const Window& window) const { return window.size() * heads_ * head_dim_; }

  /// Probability of each key of the window, mean over heads.
  std::vector<double> row(int64_t r, const Window& window) const {
    const auto n = static_cast<size_t>(window.size());
    std::vector<double> sum(n, 0.0), logit(n);
    for (int64_t h = 0; h < heads_; ++h) {
      std::fill(logit.begin(), logit.end(), 0.0);
      for (int64_t d = 0; d < head_dim_; ++d) {
        const double scaled = support::float_at(q_, r, h, d) / std::sqrt(static_cast<double>(head_dim_));
        const float* key = &keys_[static_cast<size_t>((window.request * head_dim_ + d) * width_ + window.start)];
        for (size_t i = 0; i < n; ++i) logit[i] += scaled * key[i];
      }
      const double top = *std::max_element(logit.begin(), logit.end());
      double total = 0;
      for (double& x : logit) total += x = std::exp(x - top);
      for (size_t i = 0; i < n; ++i) sum[i] += logit[i] / total;
    }
    for (double& x : sum) x /= static_cast<double>(heads_);
    return sum;
  }

 private:
  Tensor q_;
  int64_t heads_, head_dim_, requests_, width_;
  std::vector<float> keys_;
};

/// Adds one row's figures to the sums in `table`. `chosen`: relative positions, best first.
void add_row(std::vector<Quality>& table, const std::vector<double>& p, const std::vector<int64_t>& chosen) {
  std::vector<int64_t> wanted(p.size());
  std::iota(wanted.begin(), wanted.end(), 0);
  std::sort(wanted.begin(), wanted.end(), [&](int64_t i, int64_t j) {
    const double a = p[static_cast<size_t>(i)], b = p[static_cast<size_t>(j)];
    return a > b || (a == b && i < j);
  });
  std::vector<char> selected(p.size(), 0);
  size_t taken = 0;
  double mass = 0;
  for (Quality& quality : table) {  // ascending topk: each selection continues the one before
    const auto k = std::min(static_cast<size_t>(quality.topk), p.size());
    for (; taken < std::min(k, chosen.size()); ++taken) {
      selected[static_cast<size_t>(chosen[taken])] = 1;
      mass += p[static_cast<size_t>(chosen[taken])];
    }
    double hits = 0, best = 0, recent = 0;
    for (size_t i = 0; i < k; ++i) {
      hits += selected[static_cast<size_t>(wanted[i])];
      best += p[static_cast<size_t>(wanted[i])];
      recent += p[p.size() - 1 - i];
    }
    quality.recall += k == 0 ? 1 : hits / static_cast<double>(k);
    quality.mass += mass;
    quality.best += best;
    quality.recent += recent;
  }
}

std::vector<Quality> topks(int64_t own, int64_t keys) {
  std::vector<int64_t> counts;
  if (own > 0 && own <= keys) counts.push_back(own);
  for (int64_t k = kSmallest; k <= kLargest && k <= keys; k *= 2) counts.push_back(k);
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  std::vector<Quality> table;
  for (const int64_t k : counts) table.push_back({k, 0, 0, 0, 0});
  return table;
}

int64_t topk_of(const support::CallArgs& args) {
  return std::visit(
      [](const auto& a) -> int64_t {
        if constexpr (requires { a.topk; }) return a.topk;
        return 0;
      },
      args);
}

int64_t widest(const std::vector<Window>& windows) {
  int64_t width = 0;
  for (const Window& window : windows) width = std::max(width, window.size());
  return width;
}

}  // namespace

std::string study_obstacle(const support::Call& call, const std::vector<Window>& windows) {
  const support::Trace& trace = call.trace();
  const support::CallArgs& args = call.args();
  const support::TraceTensor *q = trace.find("q_bf16"), *keys = trace.find("keys_bf16");
  if (q == nullptr || keys == nullptr) return "the trace has no q_bf16 and keys_bf16";
  if (q->dtype != "BF16" || keys->dtype != "BF16") return "q_bf16 and keys_bf16 are not BF16";
  if (q->shape.size() != 3 || (keys->shape.size() != 2 && keys->shape.size() != 3))
    return "q_bf16 must be [R,H,D] and keys_bf16 [T,D] or [B,T,D]";
  if (q->shape.back() != keys->shape.back() || q->shape[0] != static_cast<int64_t>(windows.size()) || q->count() == 0) {
    return "q_bf16 and keys_bf16 do not have the rows and head_dim of the call";
  }
  const int64_t requests = keys->shape.size() == 3 ? keys->shape[0] : 1, width = keys->shape[keys->shape.size() - 2];
  for (const Window& window : windows) {
    if (window.size() > 0 && (window.start < 0 || window.request >= requests || window.end > width))
      return "keys_bf16 does not cover all rows";
  }
  const bool plain = std::visit(
      [](const auto& a) {
        if constexpr (requires { a.out.index_base; }) return a.out.index_base.data == nullptr;
        return false;
      },
      args);
  const auto* paged = std::get_if<PagedMqaTopk>(&args);
  return plain && (paged == nullptr || !paged->keys.shard.active())
             ? ""
             : "positions of this call are not those of keys_bf16";
}

namespace {

/// Evenly spaced rows (multiples of `step`) whose attention fits the work that is allowed.
std::vector<int64_t> rows_to_study(const std::vector<Window>& windows, const Attention& attention, int64_t step) {
  int64_t total = 0;
  for (const Window& window : windows) total += attention.work(window);
  const auto rows = static_cast<int64_t>(windows.size()) / step;
  const int64_t every = std::max<int64_t>(1, (total + kWork - 1) / kWork);
  std::vector<int64_t> picked;
  for (int64_t i = (rows - 1) % every; i < rows; i += every) picked.push_back(i * step);
  return picked;
}

/// The call again, in score order at the table's largest topk: there the answer for a smaller topk is a prefix. Only
/// `rows` are answered where the call can be cut.
support::Call search_again(const support::Call& call, const Exec& exec, int64_t topk,
                           const std::vector<int64_t>& rows) {
  support::CallOptions options{{{"topk", std::to_string(topk)}, {"order", "score"}, {"out", "indices"}}, UINT64_MAX};
  support::Call search(call.shared_trace(), options);
  const int64_t step = row_step(search.args()), all = rows_to_cut(search.args());
  if (all == 0 || static_cast<int64_t>(rows.size()) * step == all) {
    run_with_progress(search.args(), exec, "searching for the table");
    return search;
  }
  Progress bar("searching for the table", static_cast<int64_t>(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    support::run_args(cut_rows(search.args(), rows[i], step), exec);
    bar.at(static_cast<int64_t>(i) + 1);
  }
  return search;
}

}  // namespace

std::vector<Window> windows_of(const support::CallArgs& args) {
  std::vector<Window> windows;
  const auto collect = [&](const Rows& rows, int64_t columns, int64_t tables) {
    for (int64_t r = 0; r < rows.count; ++r) {
      const support::RowRange range = support::row_range(rows, r, columns, tables);
      const int64_t limit = rows.max_len > 0 ? std::min(columns, range.start + rows.max_len) : columns;
      const int64_t end = range.visible() == 0 ? range.start : std::max(range.start, std::min(range.end, limit));
      windows.push_back({range.start, end, tables < 0 ? 0 : range.request});
    }
  };
  if (const auto* dense = std::get_if<MqaTopk>(&args)) collect(dense->rows, dense->keys.values.shape[0], -1);
  if (const auto* paged = std::get_if<PagedMqaTopk>(&args)) {
    const Tensor& table = paged->keys.block_table;
    collect(paged->rows, table.shape[1] * paged->keys.cache.page_size, paged->keys.table_per_row ? -1 : table.shape[0]);
  }
  return windows;
}

Study study(const support::Call& call, const Exec& exec) {
  Study result;
  const std::vector<Window> windows = windows_of(call.args());
  result.of_rows = static_cast<int64_t>(windows.size());
  result.missing = study_obstacle(call, windows);
  if (!result.missing.empty()) return result;

  const Attention attention(support::view(*call.trace().find("q_bf16"), "q_bf16"),
                            support::view(*call.trace().find("keys_bf16"), "keys_bf16"));
  std::vector<Quality> table = topks(topk_of(call.args()), widest(windows));
  if (table.empty()) return result.missing = "no row sees 64 keys", result;
  const std::vector<int64_t> rows = rows_to_study(windows, attention, row_step(call.args()));
  const int64_t topk = table.back().topk;
  const support::Call search = search_again(call, exec, topk, rows);
  const auto* indices = search.output("indices")->as<int32_t>();

  Progress bar("exact attention", static_cast<int64_t>(rows.size()));
  for (const int64_t r : rows) {
    const Window& window = windows[static_cast<size_t>(r)];
    if (window.size() == 0) continue;
    std::vector<int64_t> chosen;
    for (int64_t i = r * topk; i < (r + 1) * topk; ++i) {
      if (indices[i] >= 0 && indices[i] < window.size()) chosen.push_back(indices[i]);
    }
    add_row(table, attention.row(r, window), chosen);
    bar.at(++result.rows);
  }
  for (Quality& quality : table) {
    for (double* sum : {&quality.recall, &quality.mass, &quality.best, &quality.recent}) {
      *sum /= static_cast<double>(std::max<int64_t>(result.rows, 1));
    }
  }
  result.table = std::move(table);
  return result;
}

}  // namespace topkey::cli
