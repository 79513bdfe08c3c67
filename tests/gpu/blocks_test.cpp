// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Candidate blocks in the plainest decode call (decode_call.h) and on given scores, for which a backend may have kernels of
// its own: the same answers as the calls that ask for more and so are everybody's, as backend ref on small ones, and by a
// graph that was captured at other lengths and other lists. Outputs and workspaces lie between walls of poison.
#include "tests/gpu/decode_call.h"
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

/// What a row's list of candidates looks like.
enum class Lists : int32_t {
  published,  ///< ascending, -1 behind them
  shuffled,
  repeats,  ///< with wild ids between them
  few,      ///< one or none, anywhere
  ragged,   ///< all of these
};
constexpr const char* kLists[] = {"published", "shuffled", "repeats", "few", "ragged"};

struct BlockCase : DecodeCase {
  int64_t blocks = 64;  ///< columns of the list, or to be published
  int32_t block_size = 8;
  Lists lists = Lists::published;
  std::string all_text() const {
    return text() + " blocks " + std::to_string(blocks) + " of " + std::to_string(block_size) + " lists " +
           kLists[static_cast<int>(lists)];
  }
};

int32_t wild_id(Random& random) {
  const int32_t ids[] = {-1, -7, 1 << 30, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
  return ids[random.below(5)];
}
void draw_list(const BlockCase& c, Lists lists, Random& random, int32_t* ids) {
  const int64_t all = (c.context + c.block_size - 1) / c.block_size + 1;
  const double share = std::min(1.0, 0.9 * static_cast<double>(c.blocks) / static_cast<double>(all));
  std::vector<int32_t> list;
  for (int64_t b = 0; b < all && static_cast<int64_t>(list.size()) < c.blocks; ++b) {
    if (random.chance(lists == Lists::few ? 0.5 / static_cast<double>(all) : share))
      list.push_back(static_cast<int32_t>(b));
  }
  const size_t used = list.size();
  list.resize(static_cast<size_t>(c.blocks), -1);
  if (lists == Lists::repeats) {
    for (size_t i = used; i < list.size(); ++i)
      list[i] = used > 0 && random.chance(0.5) ? list[random.below(used)] : wild_id(random);
    for (size_t i = 0; i < used; ++i) {
      if (random.chance(0.1)) list[i] = random.chance(0.5) ? list[random.below(used)] : wild_id(random);
    }
  }
  if (lists != Lists::published) random.shuffle(list);
  std::copy(list.begin(), list.end(), ids);
}
void draw_lists(const BlockCase& c, uint64_t turn, int32_t* ids) {
  Random random(c.seed * 77 + turn);
  for (int64_t r = 0; r < c.rows; ++r) {
    const Lists lists = c.lists == Lists::ragged ? static_cast<Lists>(random.below(4)) : c.lists;
    draw_list(c, lists, random, ids + r * c.blocks);
  }
}

using Answer = std::vector<int32_t>;
std::string difference(const char* what, const Answer& want, const Answer& got, int64_t columns) {
  const auto at = std::mismatch(want.begin(), want.end(), got.begin());
  if (at.first == want.end()) return {};
  const auto i = static_cast<int64_t>(at.first - want.begin());
  return std::string(what) + ": line " + std::to_string(i / columns) + ", column " + std::to_string(i % columns) +
         ": " + std::to_string(*at.second) + " instead of " + std::to_string(*at.first);
}
bool suits_ref(const DecodeCase& c) { return c.codes != Codes::normal && c.rows * c.context * c.heads <= 100000; }

class Blocks : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { prepare(Device::cuda); }
  /// Empty, or what is wrong.
  std::string check_admitted(const BlockCase& c, Tally& tally) const;
  std::string check_published(const BlockCase& c, Tally& tally) const;
  void expect_admitted(const BlockCase& c, Tally& tally) const {
    EXPECT_EQ(check_admitted(c, tally), "") << c.all_text();
  }
  void expect_published(const BlockCase& c, Tally& tally) const {
    EXPECT_EQ(check_published(c, tally), "") << c.all_text();
  }
};

/// A case's memory on the device.
struct Memory {
  explicit Memory(const BlockCase& c)
      : data(make_data(c)),
        q(data.q),
        weights(data.weights),
        pages(data.pages),
        table(data.table),
        ends(data.ends),
        ids(DType::i32, {c.rows, c.blocks}),
        out(outputs_of(c) * 4) {
    draw_lists(c, 0, ids.as<int32_t>());
  }
  PagedMqaTopk call(const BlockCase& c) const {
    return call_over(c, {q.view(), weights.view(), pages.view(), table.view(), ends.view()}, out.data());
  }
  DecodeData data;
  OnGpu q, weights, pages, table, ends;
  Array ids;
  GpuBytes out;
};

std::string Blocks::check_admitted(const BlockCase& c, Tally& tally) const {
  const Memory m(c);
  const OnGpu ids(m.ids);
  const GpuBytes counts(static_cast<size_t>(c.rows) * 4);
  PagedMqaTopk plain = m.call(c);
  plain.admit.candidates = ids.view(), plain.admit.candidate_block_size = c.block_size;
  const Stream stream;
  Exec exec = on(GetParam()), general_exec = exec;
  exec.stream = general_exec.stream = stream.stream;
  if (c.max_sms != 0) exec.max_sms = c.max_sms;
  if (!tally.runs(plain, exec, GetParam())) return {};
  PagedMqaTopk general = plain;
  general.out.counts = tensor(counts.data(), DType::i32, {c.rows});
  const GpuRoom room(plain, exec), general_room(general, general_exec);
  const auto answer = [&](const PagedMqaTopk* call, const Exec& how, const GraphOf* graph) {
    m.out.poison();
    if (graph != nullptr) graph->replay();
    if (call != nullptr) paged_mqa_topk(*call, how);
    stream.wait();
    return m.out.get<int32_t>(outputs_of(c));
  };
  const Answer want = answer(&general, general_exec, nullptr);
  std::string wrong = difference("first call", want, answer(&plain, exec, nullptr), step_of(c));
  if (wrong.empty() && suits_ref(c)) {
    Answer of_ref(outputs_of(c));
    std::memset(of_ref.data(), 0xA5, of_ref.size() * 4);
    const DecodeData& d = m.data;
    PagedMqaTopk call =
        call_over(c, {d.q.view(), d.weights.view(), d.pages.view(), d.table.view(), d.ends.view()}, of_ref.data());
    call.admit.candidates = m.ids.view(), call.admit.candidate_block_size = c.block_size;
    run(call, on("ref"));
    wrong = difference("against ref", of_ref, want, step_of(c));
  }
  if (!wrong.empty()) return wrong;
  const GraphOf graph(stream, [&] { paged_mqa_topk(plain, exec); });
  for (const uint64_t turn : {1, 0}) {
    draw_ends(c, turn, m.data.ends.as<int32_t>()), draw_lists(c, turn, m.ids.as<int32_t>());
    m.ends.upload(), ids.upload();
    const Answer replayed = answer(nullptr, exec, &graph);
    wrong = difference("replayed", answer(&general, general_exec, nullptr), replayed, step_of(c));
    if (!wrong.empty()) return wrong + ", turn " + std::to_string(turn);
  }
  return {};
}

/// Published blocks and the answer beside them. What to compare with: blocks of the call that also forces a key, which no
/// block's score hears of, and the answer of the call without blocks.
std::string Blocks::check_published(const BlockCase& c, Tally& tally) const {
  const Memory m(c);
  const GpuBytes ids(static_cast<size_t>(c.rows * c.blocks) * 4), counts(static_cast<size_t>(c.rows) * 4);
  const PagedMqaTopk bare = m.call(c);
  PagedMqaTopk plain = bare;
  plain.out.blocks = tensor(ids.data(), DType::i32, {c.rows, c.blocks}), plain.out.block_size = c.block_size;
  PagedMqaTopk counted = plain, forced = plain;
  counted.out.counts = tensor(counts.data(), DType::i32, {c.rows}), forced.admit.force_first = 1;
  const Stream stream;
  Exec exec = on(GetParam());
  exec.stream = stream.stream;
  if (c.max_sms != 0) exec.max_sms = c.max_sms;
  Exec bare_exec = exec, counted_exec = exec, forced_exec = exec;
  if (!tally.runs(plain, exec, GetParam())) return {};
  const GpuRoom room(plain, exec), bare_room(bare, bare_exec), counted_room(counted, counted_exec),
      forced_room(forced, forced_exec);
  const auto run_one = [&](const PagedMqaTopk& call, const Exec& how) {
    m.out.poison(), ids.poison();
    paged_mqa_topk(call, how);
    stream.wait();
  };
  const auto indices = [&] { return m.out.get<int32_t>(outputs_of(c)); };
  const auto blocks = [&] { return ids.get<int32_t>(static_cast<size_t>(c.rows * c.blocks)); };
  const GraphOf graph(stream, [&] { paged_mqa_topk(plain, exec); });
  for (const uint64_t turn : {0, 1, 2}) {
    draw_ends(c, turn, m.data.ends.as<int32_t>());
    m.ends.upload();
    run_one(bare, bare_exec);
    const Answer want = indices();
    run_one(forced, forced_exec);
    const Answer want_blocks = blocks();
    std::string wrong;
    const auto look = [&](const char* what) {
      if (wrong.empty()) wrong = difference(what, want, indices(), step_of(c));
      if (wrong.empty()) wrong = difference((std::string(what) + ", blocks").c_str(), want_blocks, blocks(), c.blocks);
    };
    run_one(plain, exec), look("plain");
    run_one(counted, counted_exec), look("counted");
    m.out.poison(), ids.poison(), graph.replay(), look("replayed");
    if (!wrong.empty()) return wrong + ", turn " + std::to_string(turn);
  }
  return {};
}

TEST_P(Blocks, AdmittedEveryPattern) {
  Tally tally("admitted blocks, patterns");
  for (int32_t scales = 0; scales < kNumScales; ++scales) {
    BlockCase c;
    c.scales = scales, c.seed = 20 + static_cast<uint64_t>(scales), c.lists = static_cast<Lists>(scales % 5);
    c.rows = scales % 2 == 0 ? 1 : 5, c.context = scales % 2 == 0 ? 50000 : 9000, c.blocks = 1024, c.topk = 512;
    c.heads = scales % 3 == 0 ? 64 : 32, c.scored = scales % 4 == 1;
    c.lengths = scales % 2 == 0 ? Lengths::equal : Lengths::edges;
    expect_admitted(c, tally);
  }
}

TEST_P(Blocks, AdmittedEverySize) {
  Tally tally("admitted blocks, sizes");
  uint64_t seed = 30;
  for (const int32_t size : {1, 2, 3, 8, 12, 16, 33, 64, 100}) {
    for (const int64_t rows : {1, 4, 16, 200}) {
      BlockCase c;
      c.rows = rows, c.block_size = size, c.context = rows == 200 ? 3000 : 700 * size, c.blocks = 5 + 97 * (seed % 4);
      c.topk = seed % 2 == 0 ? 64 : 300, c.lists = static_cast<Lists>(seed % 5), c.page_size = seed % 3 == 0 ? 128 : 64;
      c.codes = seed % 2 == 0 ? Codes::exact : Codes::normal, c.holes = seed % 4 == 0 ? Holes::some : Holes::none;
      c.lengths = static_cast<Lengths>(seed % 3), c.padded = seed % 5 == 0, c.heads = seed % 2 == 0 ? 8 : 64;
      c.next_n = rows == 16 && seed % 2 == 0 ? 4 : 0, c.of_requests = c.next_n > 1, c.seed = seed++;
      if (rows == 4) c.max_sms = 1 + static_cast<int32_t>(seed % 17);
      expect_admitted(c, tally);
    }
  }
}

/// Pages at addresses that no copy of 16 bytes takes: by layers over k-pools, whose caches an engine lays out.
TEST_P(Blocks, PagesApartByAnyStride) {
  Tally tally("candidate blocks, strides of pages");
  uint64_t seed = 35;
  for (const int32_t gap : {4, 8, 12, 16}) {
    for (const int32_t page_size : {64, 256}) {
      BlockCase c;
      c.rows = 3, c.context = 2000, c.page_size = page_size, c.page_gap = gap, c.codes = Codes::normal, c.seed = seed++;
      expect_admitted(c, tally);
      expect_published(c, tally);
    }
  }
}

TEST_P(Blocks, PublishedEveryPattern) {
  Tally tally("published blocks, patterns");
  for (int32_t scales = 0; scales < kNumScales; ++scales) {
    BlockCase c;
    c.scales = scales, c.seed = 40 + static_cast<uint64_t>(scales), c.topk = 512;
    c.rows = scales % 2 == 0 ? 1 : 5, c.context = scales % 2 == 0 ? 60000 : 9000,
    c.blocks = scales % 2 == 0 ? 2048 : 300;
    c.heads = scales % 3 == 0 ? 64 : 32, c.block_size = scales % 5 == 0 ? 16 : 8;
    c.lengths = scales % 2 == 0 ? Lengths::equal : Lengths::edges;
    expect_published(c, tally);
  }
}

TEST_P(Blocks, PublishedEverySize) {
  Tally tally("published blocks, sizes");
  uint64_t seed = 50;
  for (const int32_t size : {1, 2, 3, 4, 8, 16, 32, 48, 64}) {
    for (const int64_t rows : {1, 4, 16, 130}) {
      BlockCase c;
      c.rows = rows, c.block_size = size, c.context = rows == 130 ? 1500 : 9000, c.blocks = 1 + 31 * (seed % 4);
      c.topk = seed % 2 == 0 ? 64 : 300, c.page_size = seed % 3 == 0 ? 128 : 64;
      c.codes = seed % 2 == 0 ? Codes::exact : Codes::normal, c.heads = seed % 2 == 0 ? 8 : 64;
      constexpr Holes kAll[] = {Holes::none, Holes::some, Holes::most, Holes::last, Holes::rows};
      c.holes = kAll[seed % 5], c.lengths = static_cast<Lengths>(seed % 3), c.padded = seed % 5 == 0;
      c.next_n = rows == 16 && seed % 2 == 0 ? 4 : 0, c.of_requests = c.next_n > 1, c.seed = seed++;
      if (rows == 4) c.max_sms = 1 + static_cast<int32_t>(seed % 17);
      expect_published(c, tally);
    }
  }
}

/// Many rows that share keys. As above: blocks of the call that also forces a key, the answer of the call without blocks.
class PublishedByPrefill : public Blocks {
 protected:
  struct Wanted {
    int64_t blocks;
    int32_t size, topk, sms;
  };
  void check(const Problem& p, const Wanted& w, Tally& tally) const {
    if (p.spec.paged) {
      compare(p.paged_search(w.topk, {}), p, w, tally);
    } else {
      compare(p.dense_search(w.topk, {}), p, w, tally);
    }
  }

 private:
  template <class Args>
  void compare(Args args, const Problem& p, const Wanted& w, Tally& tally) const {
    const auto answer = [&](bool published, bool forced) {
      const Array indices(DType::i32, {p.count(), w.topk}), blocks(DType::i32, {p.count(), w.blocks});
      std::memset(indices.as<uint8_t>(), 0xA5, indices.bytes()),
          std::memset(blocks.as<uint8_t>(), 0xA5, blocks.bytes());
      args.out.indices = indices.view(), args.admit.force_first = forced ? 1 : 0;
      args.out.blocks = published ? blocks.view() : Tensor{}, args.out.block_size = published ? w.size : 0;
      Exec exec = on(GetParam());
      exec.max_sms = w.sms;
      if (tally.runs(args, exec, GetParam())) run(args, exec);
      return std::pair(Answer(indices.as<int32_t>(), indices.as<int32_t>() + indices.size()),
                       Answer(blocks.as<int32_t>(), blocks.as<int32_t>() + blocks.size()));
    };
    const auto got = answer(true, false);
    const std::string text = p.text() + ", " + std::to_string(w.blocks) + " of " + std::to_string(w.size);
    EXPECT_EQ(difference("indices", answer(false, false).first, got.first, w.topk), "") << text;
    EXPECT_EQ(difference("blocks", answer(true, true).second, got.second, w.blocks), "") << text;
  }
};

TEST_P(PublishedByPrefill, EveryPattern) {
  Tally tally("blocks published by prefill, patterns");
  int32_t turn = 0;
  for (const Pattern pattern : all_patterns()) {
    ProblemSpec spec;
    constexpr int32_t kHeads[] = {64, 8, 128};
    spec.heads = kHeads[turn % 3], spec.head_dim = 128, spec.rows = 261 + turn, spec.keys = turn % 2 == 0 ? 6001 : 2300;
    spec.pattern = pattern, spec.exact = pattern != Pattern::normal;
    spec.windows = turn % 4 == 0 ? Windows::full : Windows::causal;
    const int32_t sms = turn % 5 == 0 ? 7 : 0;
    check(make_problem(spec), {turn % 2 == 0 ? 300 : 1000, turn % 3 == 0 ? 16 : 8, turn % 2 == 0 ? 2048 : 300, sms},
          tally);
    ++turn;
  }
}

TEST_P(PublishedByPrefill, PagesRequestsAndGroupsOfRows) {
  Tally tally("blocks published by prefill, pages");
  for (const Windows windows : {Windows::causal, Windows::wild}) {
    ProblemSpec spec;
    spec.heads = 64, spec.head_dim = 128, spec.rows = 307, spec.keys = 5000, spec.windows = windows;
    spec.paged = true, spec.requests = 5, spec.page_size = 64;
    const Problem p = make_problem(spec);
    check(p, {200, 8, 600, 0}, tally);
    // Pages that do not exist.
    for (int64_t b = 0; b < 5; ++b) *(p.block_table.as<int32_t>() + b * p.block_table.view().stride[0] + 3) = -7;
    check(p, {200, 16, 600, 0}, tally);
  }
  ProblemSpec spec;  // more rows than maxima fit at a time
  spec.heads = 32, spec.head_dim = 128, spec.rows = 1400, spec.keys = 40000, spec.windows = Windows::causal;
  check(make_problem(spec), {2048, 8, 512, 0}, tally);
}

/// select_blocks as backend ref does it: windows that begin anywhere, special values, strides.
TEST_P(Blocks, OfGivenScores) {
  Tally tally("blocks of given scores");
  uint64_t seed = 60;
  for (const int64_t columns : {1, 63, 1000, 4096, 40003, 140000}) {
    for (const int32_t size : {1, 3, 8, 16, 64}) {
      Random random(seed++);
      const int64_t rows = columns > 10000 ? 3 : 150, wanted = 1 + static_cast<int64_t>(random.below(700));
      const Array scores(DType::f32, {rows, columns}), start(DType::i32, {rows}), end(DType::i32, {rows});
      for (int64_t i = 0; i < rows * columns; ++i) {
        const float special[] = {0.F, -0.F, std::numeric_limits<float>::quiet_NaN(),
                                 -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::infinity()};
        const uint64_t kind = seed % 3 == 0 ? random.below(8) : 5 + random.below(2);
        scores.as<float>()[i] = kind < 5 ? special[kind] : random.normal();
      }
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t first = seed % 2 == 0 ? 0 : random.between(-20, columns / 3);
        start.as<int32_t>()[r] = static_cast<int32_t>(first);
        end.as<int32_t>()[r] = static_cast<int32_t>(r == 1 ? first : random.between(first, columns + 9));
      }
      const Array blocks(DType::i32, {rows, wanted});
      SelectBlocks args{};
      args.scores = scores.view(), args.rows.count = rows, args.rows.end = end.view();
      if (seed % 2 != 0) args.rows.start = start.view();
      args.block_size = size, args.blocks = blocks.view();
      run(args, on("ref"));
      const Answer want(blocks.as<int32_t>(), blocks.as<int32_t>() + rows * wanted);
      const OnGpu scores_there(scores), start_there(start), end_there(end);
      const GpuBytes out(static_cast<size_t>(rows * wanted) * 4);
      args.scores = scores_there.view(), args.rows.end = end_there.view();
      if (args.rows.start.data != nullptr) args.rows.start = start_there.view();
      args.blocks.data = out.data();
      Exec exec = on(GetParam());
      if (seed % 4 == 0) exec.max_sms = 9;
      if (!tally.runs(args, exec, GetParam())) continue;
      const GpuRoom room(args, exec);
      select_blocks(args, exec);
      must(cudaDeviceSynchronize());
      EXPECT_EQ(difference("blocks", want, out.get<int32_t>(want.size()), wanted), "")
          << rows << " x " << columns << ", " << wanted << " of " << size << ", seed " << seed - 1;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PublishedByPrefill, ::testing::ValuesIn(gpu_backends()), backend_label);
INSTANTIATE_TEST_SUITE_P(Backends, Blocks, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
