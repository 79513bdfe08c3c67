// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Stage `search` on decode steps with drafts: none to twelve query rows a request, uniform or ragged, in every layout
// that engines use. Whatever the layout, a row gets the answer that it gets alone.
#include <algorithm>
#include <cstring>

#include "tests/backend_test.h"
#include "tests/cases/requests.h"

namespace topkey::testing {
namespace {

using cases::Ints;

/// Requests of lengths `lens` with `drafts[b]` query rows each, the newest tokens.
struct Batch {
  Ints lens, drafts;
  int32_t ratio = 1;
};

/// The batch one row after another: row j of request b sees (len - drafts + 1 + j) / ratio key rows.
Problem flat(const Batch& batch, const ProblemSpec& spec) {
  Ints keys, request, ends;
  for (size_t b = 0; b < batch.lens.size(); ++b) {
    keys.push_back(batch.lens[b] / batch.ratio);
    for (int32_t j = 0; j < batch.drafts[b]; ++j) {
      request.push_back(static_cast<int32_t>(b));
      ends.push_back(std::max(0, batch.lens[b] - batch.drafts[b] + 1 + j) / batch.ratio);
    }
  }
  return cases::requests_of(spec, keys, request, ends);
}

/// A layout of the same rows, and which row of the flat problem each of its rows is (-1: padding).
struct Laid {
  const char* name;
  Problem p;
  Ints source;
};

Laid by_indptr(const Problem& p, const Batch& batch) {
  Laid laid{"q_indptr", p, cases::progression(0, static_cast<int32_t>(p.count()))};
  Ints starts{0};
  for (const int32_t n : batch.drafts) starts.push_back(starts.back() + n);
  laid.p.request = {};
  laid.p.q_indptr = Array::of(starts);
  laid.p.spec.addressing = Addressing::q_indptr;
  return laid;
}

/// One line of the block table a query row.
Laid by_row(const Problem& p) {
  Laid laid{"table_per_row", p, cases::progression(0, static_cast<int32_t>(p.count()))};
  const int64_t columns = p.block_table.view().shape[1];
  laid.p.block_table = Array(DType::i32, {p.count(), columns});
  for (int64_t r = 0; r < p.count(); ++r) {
    std::memcpy(element(laid.p.block_table.view(), r),
                element(p.block_table.view(), p.row_request[static_cast<size_t>(r)]), static_cast<size_t>(columns) * 4);
  }
  laid.p.request = Array::of(laid.source);
  laid.p.spec.table_per_row = true;
  return laid;
}

void poison(const Tensor& t, int64_t row) {
  if (t.data == nullptr) return;
  std::memset(element(t, row), 0xFF, static_cast<size_t>(t.stride[0]) * static_cast<size_t>(dtype_bytes(t.dtype)));
}

/// `most` rows a request, those behind a request's own are padding: no request or no keys, NaN in q and in the weights.
Laid padded(const Problem& p, const Batch& batch) {
  const int32_t most = *std::max_element(batch.drafts.begin(), batch.drafts.end());
  std::vector<int64_t> rows;
  Laid laid{"padded", {}, {}};
  int32_t next = 0;
  for (const int32_t drafts : batch.drafts) {
    for (int32_t j = 0; j < most; ++j) {
      laid.source.push_back(j < drafts ? next : -1);
      rows.push_back(j < drafts ? next++ : 0);
    }
  }
  laid.p = rows_of(p, rows);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (laid.source[r] >= 0) continue;
    (r % 2 == 0 ? laid.p.request : laid.p.end).as<int32_t>()[r] = r % 2 == 0 ? -1 : 0;
    const auto row = static_cast<int64_t>(r);
    poison(laid.p.q.view(), row), poison(laid.p.q_scales.view(), row), poison(laid.p.weights.view(), row);
  }
  return laid;
}

/// The newest row of each request first, the others after: rows of a request need not be neighbours.
Laid scattered(const Problem& p, const Batch& batch) {
  std::vector<int64_t> newest, older;
  int64_t next = 0;
  for (const int32_t drafts : batch.drafts) {
    for (int32_t j = 0; j < drafts; ++j) (j + 1 == drafts ? newest : older).push_back(next + j);
    next += drafts;
  }
  newest.insert(newest.end(), older.begin(), older.end());
  return {"scattered", rows_of(p, newest), Ints(newest.begin(), newest.end())};
}

std::vector<Laid> layouts_of(const Problem& p, const Batch& batch) {
  std::vector<Laid> all{by_indptr(p, batch), by_row(p), padded(p, batch), scattered(p, batch)};
  const bool uniform = std::equal(batch.drafts.begin() + 1, batch.drafts.end(), batch.drafts.begin());
  if (uniform && batch.ratio == 1) {
    Laid laid{"next_n", p, cases::progression(0, static_cast<int32_t>(p.count()))};
    laid.p.request = {};
    laid.p.end = Array::of(batch.lens);
    laid.p.spec.addressing = Addressing::next_n;
    laid.p.spec.next_n = batch.drafts[0];
    all.push_back(laid);
  }
  return all;
}

/// Every layout's rows against the flat problem's rows asked one by one.
void check_batch(const Batch& batch, const ProblemSpec& spec, const std::string& backend, Tally& tally) {
  constexpr int32_t kTopk = 24;
  const Problem p = flat(batch, spec);
  Want want;
  want.scores = want.counts = true;
  const Outputs alone(p.count(), kTopk, want);
  const PagedMqaTopk whole = p.paged_search(kTopk, alone.selection());
  if (p.count() == 0 || !tally.runs(whole, on(backend), label_of(backend, spec))) return;
  for (int64_t r = 0; r < p.count(); ++r) {
    const Problem one = rows_of(p, {r});
    Selection own = alone.selection();
    for (Tensor* t : {&own.indices, &own.scores, &own.counts}) t->data = element(*t, r), t->shape[0] = 1;
    run(one.paged_search(kTopk, own), on(backend));
  }
  for (const Laid& laid : layouts_of(p, batch)) {
    const Outputs out(laid.p.count(), kTopk, want);
    run(laid.p.paged_search(kTopk, out.selection()), on(backend));
    require_inside(out);
    for (size_t r = 0; r < laid.source.size(); ++r) {
      const auto row = static_cast<int64_t>(r);
      const int64_t source = laid.source[r];
      const Ints got = cases::row_of<int32_t>(out.indices.view(), row);
      if (source < 0) {
        RC_ASSERT(got == Ints(kTopk, -1));
        continue;
      }
      RC_LOG() << laid.name << " row " << r;
      RC_ASSERT(got == cases::row_of<int32_t>(alone.indices.view(), source));
      RC_ASSERT(std::memcmp(element(out.scores.view(), row), element(alone.scores.view(), source), kTopk * 4) == 0);
      RC_ASSERT(int_at(out.counts.view(), row) == int_at(alone.counts.view(), source));
    }
  }
}

TEST(Speculative, EveryLayoutGivesARowItsOwnAnswer) {
  Tally tally("paged_mqa_topk, drafts");
  for (const std::string& backend : every_backend()) {
    property("drafts in every layout", backend == "ref" ? 40 : 200, [&] {
      ProblemSpec spec = [] {
        ProblemSpec drawn;
        drawn.format = draw_of({KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::f16, KeyFormat::q8_0});
        drawn.heads = static_cast<int32_t>(draw(1, 5));
        drawn.page_size = draw_of({16, 1, 64});
        drawn.exact = draw_flag();
        drawn.seed = static_cast<uint64_t>(draw(1, 1000000));
        return drawn;
      }();
      Batch batch;
      batch.ratio = draw_of({1, 2, 4});
      const bool uniform = draw_flag();
      const auto drafts = static_cast<int32_t>(draw(1, 12));
      for (int64_t b = draw(1, 5); b > 0; --b) {
        batch.lens.push_back(static_cast<int32_t>(draw(0, 90)));
        batch.drafts.push_back(uniform ? drafts : static_cast<int32_t>(draw(0, 12)));
      }
      check_batch(batch, spec, backend, tally);
    });
  }
}

/// A reference's padded rows counted back from the end of the longest request's rows, so that a request with fewer drafts
/// saw windows that were too short; and its weights were those of other rows.
TEST(Speculative, ShorterDraftsCountFromTheirOwnEnd) {
  Tally tally("paged_mqa_topk, fewer drafts than others");
  for (const std::string& backend : every_backend()) {
    ProblemSpec spec;
    spec.exact = true, spec.seed = 77;
    const Batch batch{{21, 6, 40}, {2, 1, 3}, 1};
    const Problem p = flat(batch, spec);
    const Laid laid = padded(p, batch);
    Want want;
    want.counts = true;
    const Outputs out(laid.p.count(), 64, want);
    tally.ran(backend);
    run(laid.p.paged_search(64, out.selection()), on(backend));
    Ints counts;
    for (int64_t r = 0; r < laid.p.count(); ++r) counts.push_back(static_cast<int32_t>(int_at(out.counts.view(), r)));
    EXPECT_EQ(counts, (Ints{20, 21, 0, 6, 0, 0, 38, 39, 40}));
  }
}

}  // namespace
}  // namespace topkey::testing
