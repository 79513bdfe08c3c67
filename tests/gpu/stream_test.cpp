// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What only a GPU has: captured calls and their replays, a budget of SMs, errors that leave a capture valid, repeats.
// Device memory is the test's own here; all else runs in the stage tests, on copies.
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

class OnStream : public ::testing::TestWithParam<std::string> {};

TEST_P(OnStream, AReplayFollowsTheLengthsThatItFinds) {
  prepare(Device::cuda);
  GpuSearch s(decode_spec(), 64);
  const Stream stream;
  Exec exec = on(GetParam());
  exec.stream = stream.stream;
  const GpuRoom room(s.args, exec);
  const GraphOf graph(stream, [&] { paged_mqa_topk(s.args, exec); });
  for (const int32_t shorter : {0, 1, 700, 2990, 100000}) {
    for (int64_t r = 0; r < s.problem.count(); ++r) {
      int32_t& end = s.problem.end.as<int32_t>()[r];
      end = std::max(0, end - (r % 2 == 0 ? shorter : 0));
    }
    s.end.upload();
    graph.replay();
    const std::vector<int32_t> replayed = s.indices.ints();
    s.indices.poison();
    paged_mqa_topk(s.args, exec);
    stream.wait();
    EXPECT_EQ(replayed, s.indices.ints()) << shorter;
  }
}

/// A graph made for any context answers as a call that is told the longest row.
TEST_P(OnStream, AGraphCapturedAtAMillionKeysAnswersShortRows) {
  prepare(Device::cuda);
  GpuSearch s(decode_spec(), 64);
  const Stream stream;
  Exec exec = on(GetParam());
  exec.stream = stream.stream;
  constexpr int64_t kKeys = 1048576;
  PagedMqaTopk wide = s.args;
  const int64_t width = kKeys / wide.keys.cache.page_size, used = wide.keys.block_table.shape[1];
  const Array table(DType::i32, {s.problem.spec.requests, width});
  std::fill_n(table.as<int32_t>(), table.size(), 1000000000);
  for (int64_t b = 0; b < s.problem.spec.requests; ++b) {
    for (int64_t p = 0; p < used; ++p) {
      table.as<int32_t>()[b * width + p] = static_cast<int32_t>(int_at(s.problem.paged_keys().block_table, b, p));
    }
  }
  const OnGpu wide_table(table);
  wide.keys.block_table = wide_table.view(), wide.rows.max_len = kKeys;
  const GpuRoom room(wide, exec);
  const GraphOf graph(stream, [&] { paged_mqa_topk(wide, exec); });
  s.indices.poison();
  graph.replay();
  const std::vector<int32_t> replayed = s.indices.ints();
  s.indices.poison();
  PagedMqaTopk tight = s.args;
  tight.rows.max_len = s.problem.spec.keys;
  paged_mqa_topk(tight, exec);
  stream.wait();
  EXPECT_EQ(replayed, s.indices.ints());
}

TEST_P(OnStream, AnArgumentErrorLeavesACaptureOpen) {
  prepare(Device::cuda);
  GpuSearch s(decode_spec(), 64);
  const Stream stream;
  Exec exec = on(GetParam());
  exec.stream = stream.stream;
  const GpuRoom room(s.args, exec);
  const GraphOf graph(stream, [&] {
    PagedMqaTopk wrong = s.args;
    wrong.topk = -1;
    EXPECT_EQ(thrown_by([&] { paged_mqa_topk(wrong, exec); }).status, Status::invalid_argument);
    paged_mqa_topk(s.args, exec);
  });
  s.indices.poison();
  graph.replay();
  const std::vector<int32_t> replayed = s.indices.ints();
  s.indices.poison();
  paged_mqa_topk(s.args, exec);
  stream.wait();
  EXPECT_EQ(replayed, s.indices.ints());
}

TEST_P(OnStream, ABudgetOfSmsChangesNoBit) {
  for (const bool prefill : {false, true}) {
    ProblemSpec spec = decode_spec();
    if (prefill) spec.rows = 200, spec.requests = 2, spec.windows = Windows::causal;
    GpuSearch s(spec, 100);
    Exec exec = on(GetParam());
    const GpuRoom room(s.args, exec);
    std::vector<int32_t> first;
    for (const int32_t sms : {0, 1, 17, 78}) {
      exec.max_sms = sms;
      s.indices.poison();
      paged_mqa_topk(s.args, exec);
      must(cudaDeviceSynchronize());
      if (sms == 0) first = s.indices.ints();
      EXPECT_EQ(first, s.indices.ints()) << sms;
    }
  }
}

/// Each of ten thousand calls in a row, without a pause between them, gives the bits of the first: a race would have to
/// lose every time. Many rows, and one row that is split.
TEST_P(OnStream, TenThousandRunsGiveTheSameBits) {
  constexpr int kRuns = 10000, kAtOnce = 100;
  constexpr int32_t kTopk = 200;
  for (const bool split : {false, true}) {
    for (const Pattern pattern :
         {Pattern::all_equal, Pattern::nans, Pattern::relu_plateau, Pattern::ties_at_cut, Pattern::few_mantissa_bits}) {
      ProblemSpec spec = decode_spec();
      spec.pattern = pattern;
      if (split) spec.rows = spec.requests = 1, spec.keys = 30000;
      GpuSearch s(spec, kTopk);
      Exec exec = on(GetParam());
      const size_t size = static_cast<size_t>(spec.rows) * kTopk;
      const GpuBytes all(kAtOnce * size * 4), scores(kAtOnce * size * 4);
      s.args.out.scores = s.args.out.indices, s.args.out.scores.dtype = DType::f32;
      s.args.out.scores.data = scores.data();
      const GpuRoom room(s.args, exec);
      std::vector<int32_t> first;
      for (int done = 0; done < kRuns; done += kAtOnce) {
        all.poison(), scores.poison();
        for (size_t i = 0; i < kAtOnce; ++i) {
          s.args.out.indices.data = all.data() + i * size * 4;
          s.args.out.scores.data = scores.data() + i * size * 4;
          paged_mqa_topk(s.args, exec);
        }
        must(cudaDeviceSynchronize());
        for (const GpuBytes* each : {&all, &scores}) {
          const std::vector<int32_t> got = each->get<int32_t>(kAtOnce * size);
          const bool indices = each == &all;
          if (done == 0) first.insert(first.end(), got.begin(), got.begin() + static_cast<ptrdiff_t>(size));
          const int32_t* want = first.data() + (indices ? 0 : size);
          for (size_t i = 0; i < kAtOnce; ++i) {
            ASSERT_EQ(std::memcmp(want, got.data() + i * size, size * 4), 0)
                << pattern_name(pattern) << " run " << done + static_cast<int>(i) << (indices ? " indices" : " scores");
          }
        }
      }
    }
  }
}

TEST_P(OnStream, StrictAndUnknownDevicesAreRefused) {
  GpuSearch s(decode_spec(), 64);
  Exec exec = on(GetParam());
  exec.strict = true;
  EXPECT_EQ(thrown_by([&] { paged_mqa_topk(s.args, exec); }).status, Status::unsupported);
  exec.strict = false;
  const GpuRoom room(s.args, exec);
  exec.device_id = 4000;
  EXPECT_EQ(thrown_by([&] { paged_mqa_topk(s.args, exec); }).status, Status::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(Backends, OnStream, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
