// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The command over ranks: run --ranks of every cut, cache and layer, and what scale tells.
#include <gmock/gmock.h>

#include <map>
#include <nlohmann/json.hpp>

#include "support/trace.h"
#include "tests/cli.h"

namespace topkey::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

class CliRanks : public CliTest {};

TEST_F(CliRanks, RunsOnRanks) {
  const std::string trace = path("ranks.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + trace +
                        " --rows 9 --keys 300 --requests 3 --topk 40 --heads 4 --head-dim 32 --page-size 16")
                .code,
            0);
  for (const std::string cut : {"context", "rows", "prefill"}) {
    const std::string arguments = "run " + trace + " --ranks 3 --interleave 4 --json --shard " + cut;
    const Outcome outcome = run_command(arguments);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const Json json = Json::parse(outcome.out);
    EXPECT_EQ(json["equal"], true) << cut;
    EXPECT_EQ(json["by_rank"].size(), 3U) << cut;
    EXPECT_GT(json["received"], 0) << cut;
    EXPECT_GE(json["balance"], 1.0) << cut;
    EXPECT_LT(json["balance"], 2.0) << cut;
  }
  // Bounds before the first key: the winners are told from them, by one rank as by many.
  ASSERT_EQ(run_command("make-trace -o " + path("before.safetensors") +
                        " --rows 9 --keys 300 --requests 3 --topk 40 --heads 4 --head-dim 32 --windows random")
                .code,
            0);
  Trace before = read_trace(path("before.safetensors"));
  ASSERT_NE(before.find("starts"), nullptr);
  auto *starts = before.tensors.at("starts").as<int32_t>(), *lens = before.tensors.at("lens").as<int32_t>();
  for (const bool alone : {false, true}) {
    if (alone) std::fill(starts, starts + 9, 0), std::fill(lens, lens + 9, 0);
    starts[4] = -5, lens[4] = 90;
    write_trace(path("before.safetensors"), before);
    for (const std::string cut : {"context", "rows"}) {
      const Outcome outcome = run_command("run " + path("before.safetensors") + " --ranks 3 --json --shard " + cut);
      ASSERT_EQ(outcome.code, 0) << cut << outcome.out << outcome.err;
    }
  }
  lens[4] = INT32_MAX;
  write_trace(path("before.safetensors"), before);
  for (const std::string more : {"--shard rows", "--shard context --interleave 64"})
    expect_refused("run " + path("before.safetensors") + " --ranks 3 " + more, 2, "page ids outside its cache");
  lens[4] = 90;
  write_trace(path("before.safetensors"), before);
  expect_refused("run " + path("before.safetensors") + " --ranks 3 --shard prefill", 2, "wants windows from 0");
  EXPECT_THAT(run_command("run " + trace + " --ranks 2").out,
              HasSubstr("equal to the answer of one rank, bit for bit"));
  expect_refused("run " + trace + " --ranks 2 -o " + path("unwritten"), 2, "--output must be absent with --ranks");
  const std::string dense = path("dense.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + dense + " --op mqa_topk --rows 2 --keys 30").code, 0);
  expect_refused("run " + dense + " --ranks 2", 2, "--ranks wants a trace of paged_mqa_topk");
}

/// Keys that are pools: the layer over them, whose answer is tokens.
TEST_F(CliRanks, RunsPoolsOnRanks) {
  const std::string trace = path("pools.safetensors");
  for (const std::string more : {"", " --next-n 3", " --format mxfp4"}) {
    const std::string rows = more == " --next-n 3" ? "" : " --rows 9";
    ASSERT_EQ(run_command("make-trace -o " + trace + rows + more +
                          " --pool-size 4 --keys 300 --requests 3 --topk 40 --heads 4 --head-dim 32 --page-size 16")
                  .code,
              0);
    std::map<std::string, double> received;
    for (const std::string cut : {"context", "rows", "prefill"}) {
      const Outcome outcome = run_command("run " + trace + " --ranks 3 --interleave 4 --json --shard " + cut);
      ASSERT_EQ(outcome.code, 0) << outcome.err;
      const Json json = Json::parse(outcome.out);
      EXPECT_EQ(json["equal"], true) << cut;
      EXPECT_EQ(json["pool_size"], 4) << cut;
      EXPECT_EQ(json["by_rank"].size(), 3U) << cut;
      EXPECT_LT(json["balance"], 2.0) << cut;
      received[cut] = json["received"];
    }
    // A score and a position of each of 40 pools and not of 160 tokens; 2 KiB and two hashes to agree.
    EXPECT_EQ(received["context"], 3 * 2 * (9 * 40 * 8 + 2048 + 16));
  }
  EXPECT_THAT(
      run_command("run " + trace + " --ranks 2").out,
      AllOf(HasSubstr("keys are pools of 4 tokens"), HasSubstr("equal to the answer of one rank, bit for bit")));
  Trace wrong = read_trace(trace);
  wrong.tensors.erase("positions");
  write_trace(trace, wrong);
  EXPECT_EQ(run_command("run " + trace + " --ranks 2").code, 0) << "without an open pool";
  for (const std::string& size :
       std::vector<std::string>{"0", "-4", "x", "4.5", "1025", "999999999", std::string("4\0x", 3)}) {
    wrong.metadata["pool_size"] = size;
    write_trace(trace, wrong);
    expect_refused("run " + trace + " --ranks 2", 2, "--ranks wants a pool_size from 1 to 1024");
  }
  expect_refused("make-trace -o " + trace + " --pool-size 4 --windows random --keys 300 --rows 9", 2,
                 "windows must begin at 0 with --pool-size");
  expect_refused("make-trace -o " + trace + " --op mqa_topk --pool-size 4", 2, "--pool-size must be absent");
}

TEST_F(CliRanks, RanksTakeEveryCache) {
  const std::string trace = path("cache.safetensors");
  for (const std::string cache :
       {"--format fp8_fnuz", "--layout tiled16", "--format mxfp4 --layout tiled32", "--format q8_0"}) {
    ASSERT_EQ(
        run_command("make-trace -o " + trace + " --rows 6 --keys 200 --requests 2 --topk 20 --heads 4 " + cache).code,
        0);
    for (const std::string cut : {"context", "rows", "prefill"}) {
      const Outcome outcome = run_command("run " + trace + " --ranks 2 --shard " + cut);
      EXPECT_EQ(outcome.code, 0) << cache << " " << cut << outcome.out << outcome.err;
    }
  }
  Trace padded = read_trace(trace);
  ASSERT_NE(padded.find("row_request"), nullptr);
  padded.tensors.at("row_request").as<int32_t>()[2] = -1;
  write_trace(trace, padded);
  EXPECT_EQ(run_command("run " + trace + " --ranks 4 --shard prefill").code, 0);
  padded.metadata["out"] = "indices,blocks", padded.metadata["num_blocks"] = "4", padded.metadata["block_size"] = "8";
  write_trace(trace, padded);
  EXPECT_EQ(run_command("run " + trace + " --ranks 2").code, 0);
  padded.metadata["max_len"] = "20";  // the newest block of a cut window is another than the ranks'
  write_trace(trace, padded);
  expect_refused("run " + trace + " --ranks 2", 2, "--ranks wants windows inside max_len and the table");
}

TEST_F(CliRanks, ManyRanksOnThreadsEnd) {
  const std::string trace = path("ranks.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + trace + " --rows 8 --keys 4096 --topk 512 --heads 4 --head-dim 32").code, 0);
  for (const std::string cut : {"context", "rows", "prefill"}) {
    const Outcome outcome = run_command("run " + trace + " --ranks 256 --json --shard " + cut);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(Json::parse(outcome.out)["equal"], true) << cut;
  }
  expect_refused("run " + trace + " --ranks 0", 2, "--ranks must be from 1 to 1024 without mpirun, got 0");
}

TEST_F(CliRanks, TellsWhatShardingWouldCost) {
  const Outcome outcome = run_command("scale --context 131072 --rows 64 --requests 64 --ranks 4");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("model, not measured"));
  // Three others send 64 rows of 2048 winners, 8 bytes each.
  EXPECT_THAT(outcome.out, HasSubstr(std::to_string(3 * 64 * 2048 * 8)));
  // The largest of everything stays in 63 bits; what is larger is refused.
  const std::string most =
      "scale --context 2147483647 --ranks 1048576 --rows 1048576 --topk 65536 --requests 1048576 --key-bytes 2048 "
      "--blocks 65536 --interleave 1024 --token-bytes 1048576 --shard ";
  for (const char* cut : {"context", "rows", "tokens", "prefill"}) {
    const Outcome large = run_command(most + cut);
    EXPECT_EQ(large.code, 0) << cut;
    EXPECT_EQ(large.out.find(" -"), std::string::npos) << large.out;
  }
  EXPECT_EQ(run_command("scale --context 2147483648").code, 2);
  expect_refused("scale --context 9 --tflops nan", 2, "must be numbers, got nan");
}

}  // namespace
}  // namespace topkey::testing
