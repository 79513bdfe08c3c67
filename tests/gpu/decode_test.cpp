// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The plainest decode call (decode_call.h), for which a backend may have kernels of its own: the same bits as the call that
// asks for counts or stats too, and so is everybody's; as backend ref on small ones; again and again, and by a graph that
// was captured at other lengths. Outputs and workspaces lie between walls of poison.
#include "tests/gpu/decode_call.h"
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

class Decode : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { prepare(Device::cuda); }
  /// Empty, or what is wrong.
  std::string check(const DecodeCase& c, Tally& tally) const;
  void expect(const DecodeCase& c, Tally& tally) const {
    const std::string wrong = check(c, tally);
    EXPECT_EQ(wrong, "") << c.text();
  }
};

using Answer = std::vector<int32_t>;

std::string difference(const DecodeCase& c, const char* what, const Answer& want, const Answer& got,
                       const int32_t* ends) {
  const auto at = std::mismatch(want.begin(), want.end(), got.begin());
  if (at.first == want.end()) return {};
  const auto i = static_cast<int64_t>(at.first - want.begin()), row = i / step_of(c) % c.rows;
  std::ostringstream s;
  s << what << ": row " << row << " of length " << ends[end_of(c, row)] << ", column " << i % step_of(c) << ": "
    << *at.second << " instead of " << *at.first;
  return s.str();
}

/// Small enough for backend ref, and scores that are exact in any arithmetic.
bool suits_ref(const DecodeCase& c) { return c.codes != Codes::normal && c.rows * c.context * c.heads <= 100000; }
Answer answer_of_ref(const DecodeCase& c, const DecodeData& d) {
  Answer out(outputs_of(c));
  std::memset(out.data(), 0xA5, out.size() * 4);
  run(call_over(c, {d.q.view(), d.weights.view(), d.pages.view(), d.table.view(), d.ends.view()}, out.data()),
      on("ref"));
  return out;
}

std::string Decode::check(const DecodeCase& c, Tally& tally) const {
  const DecodeData d = make_data(c);
  const OnGpu q(d.q), weights(d.weights), pages(d.pages), table(d.table), ends(d.ends);
  const GpuBytes out(outputs_of(c) * 4), counts(static_cast<size_t>(c.rows) * 4), stats(kNumStats * sizeof(uint64_t));
  const PagedMqaTopk plain =
      call_over(c, {q.view(), weights.view(), pages.view(), table.view(), ends.view()}, out.data());
  const Stream stream;
  Exec exec = on(GetParam()), general_exec = exec;
  exec.stream = stream.stream;
  if (c.max_sms != 0) exec.max_sms = c.max_sms;
  if (!tally.runs(plain, exec, GetParam())) return {};
  PagedMqaTopk general = plain;
  general.out.counts = tensor(counts.data(), DType::i32, {c.rows});
  general_exec.stream = stream.stream;
  if (c.seed % 2 == 0) general_exec.stats = reinterpret_cast<uint64_t*>(stats.data());
  const GpuRoom room(plain, exec), general_room(general, general_exec);
  const auto answer = [&](const std::function<void()>& call) {
    out.poison();
    call();
    stream.wait();
    return out.get<int32_t>(outputs_of(c));
  };
  const auto by_general = [&] { return answer([&] { paged_mqa_topk(general, general_exec); }); };
  const int32_t* lengths = d.ends.as<int32_t>();
  const Answer want = by_general();
  std::string wrong;
  for (const char* what : {"first call", "second call"}) {
    if (wrong.empty()) wrong = difference(c, what, want, answer([&] { paged_mqa_topk(plain, exec); }), lengths);
  }
  if (wrong.empty() && suits_ref(c)) wrong = difference(c, "against ref", answer_of_ref(c, d), want, lengths);
  if (wrong.empty() && c.next_n <= 1 && c.seed % 2 == 1) {
    // Whose the rows are is told: in another order, some twice, some of none.
    const Array requests(DType::i32, {c.rows});
    for (int64_t r = 0; r < c.rows; ++r) {
      const int64_t ids[] = {
          (r * 7 + 1) % c.rows, (r * 7 + 1) % c.rows, c.rows - 1 - r, r / 2, r % 3 == 1 ? -1 : r, c.rows};
      requests.as<int32_t>()[r] = static_cast<int32_t>(ids[(r + static_cast<int64_t>(c.seed) / 2) % 6]);
    }
    const OnGpu told(requests);
    PagedMqaTopk plain_told = plain, general_told = general;
    plain_told.rows.request = general_told.rows.request = told.view();
    const Answer expected = answer([&] { paged_mqa_topk(general_told, general_exec); });
    const Answer got = answer([&] { paged_mqa_topk(plain_told, exec); });
    wrong = difference(c, "requests told", expected, got, lengths);
  }
  if (!wrong.empty()) return wrong;
  const GraphOf graph(stream, [&] { paged_mqa_topk(plain, exec); });
  for (const uint64_t turn : {1, 2, 0}) {
    draw_ends(c, turn, d.ends.as<int32_t>());
    ends.upload();
    const Answer replayed = answer([&] { graph.replay(); });
    wrong = difference(c, "replayed", by_general(), replayed, lengths);
    if (!wrong.empty()) return wrong + ", turn " + std::to_string(turn);
  }
  return {};
}

constexpr int32_t kHeads[] = {32, 64, 8, 40, 24};
constexpr int32_t kPages[] = {64, 128, 256};

TEST_P(Decode, EveryPattern) {
  Tally tally("decode, patterns");
  struct Shape {
    int64_t rows, context;
    int32_t topk;
    Lengths lengths;
  };
  for (int32_t scales = 0; scales < kNumScales; ++scales) {
    for (const Shape& shape : {Shape{1, 8192, 2048, Lengths::equal},
                               {3, 5000, 512, Lengths::ragged},
                               {2, 30000, 2048, Lengths::equal},
                               {64, 8192, 2048, Lengths::equal},
                               {33, 8000, 64, Lengths::edges},
                               {7, 2100, 2048, Lengths::ragged}}) {
      DecodeCase c;
      c.rows = shape.rows, c.context = shape.context, c.topk = shape.topk, c.lengths = shape.lengths;
      c.scales = scales, c.heads = shape.rows % 2 == 0 ? 64 : 32, c.seed = 10 + static_cast<uint64_t>(scales);
      expect(c, tally);
    }
  }
}

TEST_P(Decode, EveryLength) {
  Tally tally("decode, lengths");
  for (const int32_t topk : {1, 7, 64, 512, 2048}) {
    for (const int64_t context : {1, 63, 64, 65, topk - 1, topk, topk + 1, topk + 63, 2 * topk, 3 * topk + 64}) {
      if (context == 0) continue;
      for (const int64_t rows : {1, 3}) {
        DecodeCase c;
        c.rows = rows, c.context = context, c.topk = topk, c.codes = rows == 1 ? Codes::exact : Codes::normal;
        c.lengths = rows == 1 ? Lengths::equal : Lengths::edges, c.fill = rows == 1 ? Fill::minus_one : Fill::value;
        c.heads = kHeads[topk % 5], c.seed = static_cast<uint64_t>(context);
        expect(c, tally);
      }
    }
  }
}

TEST_P(Decode, PagesApartByAnyStride) {
  Tally tally("decode, strides of pages");
  uint64_t seed = 450;
  for (const int32_t gap : {4, 8, 12, 16}) {
    for (const int64_t context : {1000, 20000}) {
      DecodeCase c;
      c.rows = 3, c.context = context, c.page_gap = gap, c.codes = Codes::normal, c.seed = seed++;
      expect(c, tally);
    }
  }
}

/// No row can have more keys than are wanted, or the call only finds that it has not: by lengths, in a replay or at once.
TEST_P(Decode, RowsThatAreWantedWhole) {
  Tally tally("decode, rows that are wanted whole");
  uint64_t seed = 500;
  for (const int32_t topk : {64, 501, 1024, 2048, 4096}) {
    for (const int32_t page_size : {1, 16, 64, 256}) {
      for (const int64_t rows : {1, 6, 64}) {
        if (page_size > topk) continue;
        DecodeCase c;
        c.rows = rows, c.topk = topk, c.page_size = page_size, c.seed = seed++;
        c.next_n = rows == 6 ? 3 : 0, c.of_requests = c.next_n != 0 && topk % 2 == 0;
        c.context = topk / page_size * page_size, c.lengths = static_cast<Lengths>(seed % 3);
        c.holes = static_cast<Holes>(seed % 4), c.fill = seed % 3 == 0 ? Fill::value : Fill::minus_one;
        c.length_form = !c.of_requests && seed % 2 == 0, c.padded = seed % 5 == 0;
        if (rows == 64) c.max_sms = 3;
        expect(c, tally);
        c.max_len = topk, c.spare = 3 * topk;
        expect(c, tally);
        c.max_len = 0, c.spare = 20000;  // room for long rows, of which there are none
        expect(c, tally);
      }
    }
  }
}

TEST_P(Decode, EveryNumberOfRowsAndHeads) {
  Tally tally("decode, rows and heads");
  uint64_t seed = 100;
  for (const int64_t rows : {1, 2, 3, 4, 7, 16, 33, 64, 128}) {
    for (const int32_t heads : kHeads) {
      DecodeCase c;
      c.rows = rows, c.heads = heads, c.page_size = kPages[seed % 3], c.topk = heads == 8 ? 512 : 2048;
      c.context = seed % 4 == 0 ? 3000 : 8192, c.codes = Codes::normal, c.padded = heads == 24, c.seed = seed++;
      c.lengths = static_cast<Lengths>(seed % 3);
      expect(c, tally);
    }
  }
}

TEST_P(Decode, AbsentPages) {
  Tally tally("decode, absent pages");
  uint64_t seed = 200;
  for (const Holes holes : {Holes::some, Holes::first, Holes::last, Holes::most, Holes::rows}) {
    for (const int64_t rows : {1, 4, 17}) {
      for (const int32_t topk : {64, 2048}) {
        DecodeCase c;
        c.rows = rows, c.context = 7000, c.topk = topk, c.holes = holes, c.page_size = kPages[seed % 3];
        c.scales = seed % 2 == 0 ? 0 : kTieRun;
        c.lengths = rows == 4 ? Lengths::equal : Lengths::edges, c.seed = seed++, c.spare = 1000;
        expect(c, tally);
      }
    }
  }
}

TEST_P(Decode, LongRows) {
  Tally tally("decode, long rows");
  constexpr auto kNormal = static_cast<int32_t>(Pattern::normal),
                 kPlateau = static_cast<int32_t>(Pattern::relu_plateau);
  for (const int32_t scales : {kNormal, kPlateau, int32_t{kTieRun}, int32_t{kOddBlocks}}) {
    DecodeCase c;
    c.scales = scales, c.topk = 2048, c.heads = 64, c.context = 300000;
    expect(c, tally);
    c.rows = 21, c.context = 70000, c.lengths = Lengths::one_long, c.heads = 32;
    expect(c, tally);
    c.rows = 4, c.context = 40000, c.lengths = Lengths::equal;
    expect(c, tally);
  }
}

/// More keys a thread block than it can keep the scores of: long rows on few SMs, or many of them.
TEST_P(Decode, MoreThanABlockKeeps) {
  Tally tally("decode, more than a block keeps");
  struct Shape {
    int64_t rows, context;
    int32_t sms, heads;
    Lengths lengths;
  };
  uint64_t seed = 400;
  for (const Pattern pattern : {Pattern::normal, Pattern::ascending, Pattern::descending, Pattern::relu_plateau,
                                Pattern::ties_at_cut, Pattern::all_equal, Pattern::nans, Pattern::few_mantissa_bits}) {
    for (const Shape& shape : {Shape{1, 100000, 1, 32, Lengths::equal},
                               {3, 50000, 1, 64, Lengths::ragged},
                               {5, 70000, 4, 32, Lengths::one_long},
                               {128, 40000, 0, 64, Lengths::ragged}}) {
      DecodeCase c;
      c.rows = shape.rows, c.context = shape.context, c.max_sms = shape.sms, c.heads = shape.heads;
      c.topk = seed % 3 == 0 ? 512 : 2048, c.lengths = shape.lengths, c.scales = static_cast<int32_t>(pattern);
      c.holes = seed % 5 == 0 ? Holes::some : Holes::none, c.seed = seed++;
      expect(c, tally);
    }
  }
  for (const int32_t scales : {kAllNans, kTieRun, kSteps, kOddBlocks, kOutlier}) {
    DecodeCase c;
    c.rows = 2, c.context = 80000, c.max_sms = 2, c.topk = 2048, c.scales = scales, c.seed = seed++;
    c.lengths = scales == kSteps ? Lengths::ragged : Lengths::equal;
    expect(c, tally);
  }
}

TEST_P(Decode, FewSms) {
  Tally tally("decode, few SMs");
  uint64_t seed = 300;
  for (const int32_t sms : {1, 2, 17, 78}) {
    for (const int64_t rows : {1, 3, 16, 40}) {
      for (const Pattern pattern : {Pattern::normal, Pattern::all_equal}) {
        DecodeCase c;
        c.rows = rows, c.max_sms = sms, c.scales = static_cast<int32_t>(pattern), c.topk = 512;
        c.context = rows == 1 ? 9000 : 2500, c.lengths = seed % 3 == 0 ? Lengths::equal : Lengths::ragged;
        c.heads = kHeads[seed % 5], c.seed = seed++;
        expect(c, tally);
      }
    }
  }
}

TEST_P(Decode, SeveralRowsOfARequest) {
  Tally tally("decode, several rows of a request");
  uint64_t seed = 400;
  for (int32_t next_n = 1; next_n <= 8; ++next_n) {
    for (const int64_t requests : {1, 5, 16, 48}) {
      for (const bool of_requests : {false, true}) {
        DecodeCase c;
        c.rows = requests * next_n, c.next_n = next_n, c.of_requests = of_requests && next_n > 1, c.topk = 512;
        c.context = requests == 16  ? 3000
                    : requests < 16 ? 20000
                                    : 9000,
        c.lengths = seed % 2 == 0 ? Lengths::equal : Lengths::edges;
        c.heads = kHeads[seed % 5], c.codes = Codes::normal, c.seed = seed++;
        if (seed % 3 == 0) c.holes = Holes::some;
        c.scored = seed % 4 == 1;
        c.length_form = c.padded = !of_requests && requests != 1;
        expect(c, tally);
      }
    }
  }
}

/// Rows of a request that end anywhere, of every pattern: long enough for the kernel whose rows share a read.
TEST_P(Decode, RowsThatShareARead) {
  Tally tally("decode, rows that share a read");
  uint64_t seed = 500;
  for (int32_t scales = 0; scales < kNumScales; ++scales) {
    for (const Lengths lengths : {Lengths::equal, Lengths::ragged, Lengths::edges, Lengths::one_long}) {
      DecodeCase c;
      c.next_n = static_cast<int32_t>(2 + seed % 4), c.rows = c.next_n * (seed % 3 == 0 ? 1 : 9), c.scales = scales;
      c.context = 12000, c.lengths = lengths, c.of_requests = lengths == Lengths::equal;
      c.heads = seed % 2 == 0 ? 64 : 32, c.topk = seed % 5 == 0 ? 512 : 2048, c.scored = seed % 7 == 0;
      c.holes = seed % 6 == 0 ? Holes::some : Holes::none, c.seed = seed++;
      expect(c, tally);
    }
  }
}
/// The same where a block cannot keep all scores.
TEST_P(Decode, RowsThatShareAReadOfMoreThanABlockKeeps) {
  Tally tally("decode, rows that share a read of more than a block keeps");
  uint64_t seed = 600;
  for (const Pattern pattern : {Pattern::normal, Pattern::ascending, Pattern::descending, Pattern::relu_plateau,
                                Pattern::ties_at_cut, Pattern::all_equal, Pattern::nans}) {
    for (const Lengths lengths : {Lengths::equal, Lengths::ragged, Lengths::one_long}) {
      DecodeCase c;
      c.next_n = seed % 3 == 0 ? 4 : 2, c.rows = c.next_n * 3, c.context = 40000, c.max_sms = seed % 2 == 0 ? 2 : 3;
      c.scales = static_cast<int32_t>(pattern), c.lengths = lengths, c.heads = seed % 2 == 0 ? 32 : 64;
      c.topk = seed % 4 == 0 ? 512 : 2048, c.holes = seed % 5 == 0 ? Holes::some : Holes::none, c.seed = seed++;
      expect(c, tally);
    }
  }
}

/// Slices that end with their row, or not: lengths that differ a little, much, or leave blocks without keys.
TEST_P(Decode, RaggedRows) {
  Tally tally("decode, ragged rows");
  uint64_t seed = 700;
  for (const Lengths lengths : {Lengths::ragged, Lengths::one_long, Lengths::edges}) {
    for (const int64_t rows : {2, 31, 64, 128}) {
      for (const int32_t sms : {0, 40}) {
        DecodeCase c;
        c.rows = rows, c.context = rows == 2 ? 150000 : 30000, c.lengths = lengths, c.max_sms = sms;
        c.next_n = seed % 3 == 0 && rows % 2 == 0 ? 2 : 0, c.topk = seed % 2 == 0 ? 2048 : 512;
        c.codes = Codes::normal, c.heads = kHeads[seed % 5], c.scored = seed % 4 == 0, c.seed = seed++;
        expect(c, tally);
      }
    }
  }
}

/// About as many contexts below 2^n as between 2^n and 2^(n + 1).
int64_t draw_context() {
  const int64_t power = draw(0, 15), keys = draw(int64_t{1} << power, int64_t{2} << power);
  return std::min<int64_t>(keys, 40000);
}

TEST_P(Decode, Drawn) {
  Tally tally("decode, drawn");
  // Where one kernel takes all calls there is little to find.
  const int cases = GetParam() == "cuda.sm90" ? 2000 : 300;
  property("the plainest decode call equals the one that asks for more", cases, [&] {
    DecodeCase c;
    c.rows = draw_of({1, 2, 3, 4, 7, 16, 33, 64, 128}), c.context = draw_context();
    c.next_n = draw_of({0, 0, 0, 1, 2, 4, 8});
    if (c.next_n > 1) c.rows = (c.rows + c.next_n - 1) / c.next_n * c.next_n;
    c.topk = draw_of({1, 7, 64, 512, 2048, 2048}), c.heads = draw_of({8, 24, 32, 40, 64});
    if (draw_flag(8)) c.topk = static_cast<int32_t>(std::min<int64_t>(c.context + draw(1, 70), 3000));
    c.page_size = draw_of({64, 128, 256}), c.scales = static_cast<int32_t>(draw(0, kNumScales - 1));
    c.codes = draw_of({Codes::equal, Codes::equal, Codes::exact, Codes::normal});
    c.lengths = draw_of({Lengths::equal, Lengths::ragged, Lengths::edges, Lengths::one_long});
    if (draw_flag(3)) c.holes = draw_of({Holes::some, Holes::first, Holes::last, Holes::most, Holes::rows});
    if (draw_flag(3)) c.spare = draw(1, 3000);
    if (draw_flag(4)) c.max_len = draw(1, c.context);
    c.length_form = draw_flag(), c.of_requests = c.next_n > 1 && !c.length_form && draw_flag();
    c.padded = draw_flag(4), c.scored = draw_flag(3);
    c.fill = draw_of({Fill::minus_one, Fill::minus_one, Fill::value, Fill::repeat});
    if (draw_flag(3)) c.max_sms = draw_of({1, 17, 78, 131});
    c.seed = static_cast<uint64_t>(draw(1, 1000000));
    RC_LOG() << c.text();
    if (const std::string wrong = check(c, tally); !wrong.empty()) RC_FAIL(wrong);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, Decode, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
