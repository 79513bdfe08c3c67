// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The built command, as a user or a script meets it: exit codes, --json, hostile files, every operation from make-trace
// through run to check. A complaint is one line on stderr; no exception and no signal ends the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "support/call.h"
#include "tests/testing.h"

namespace topkey::testing {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;
namespace fs = std::filesystem;

struct Outcome {
  int code = -1;  ///< -1: ended by a signal
  std::string out, err;
};

std::string file_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class Cli : public ::testing::Test {
 protected:
  Cli() { fs::create_directories(folder_); }
  ~Cli() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }
  Outcome run_command(const std::string& arguments, const std::string& environment = "") const {
    const std::string command =
        environment + " " TOPKEY_CLI " " + arguments + " >" + path("out") + " 2>" + path("err") + " </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, file_text(path("out")), file_text(path("err"))};
  }
  /// Exit code and one worded line on stderr.
  void expect_refused(const std::string& arguments, int code, const std::string& words = "",
                      const std::string& environment = "") const {
    const Outcome outcome = run_command(arguments, environment);
    EXPECT_EQ(outcome.code, code) << arguments << "\n" << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(words)) << arguments;
    EXPECT_EQ(outcome.err.rfind("topkey: ", 0), 0U) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
  std::string small_trace(const std::string& options = "") const {
    const std::string file = path("small.safetensors");
    const Outcome outcome =
        run_command("make-trace -o " + file +
                    " --heads 2 --head-dim 32 --rows 4 --keys 90 --topk 5 --page-size 16 --expected " + options);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return file;
  }

 private:
  fs::path folder_ = fs::path(::testing::TempDir()) /
                     (std::string("cli_test_") + ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(Cli, InfoRunsEveryCellOfItsMatrix) {
  const Outcome text = run_command("info");
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_THAT(text.out, HasSubstr(TOPKEY_VERSION));
  const Json json = Json::parse(run_command("info --json").out);
  EXPECT_EQ(json["backends"].size(), backends().size());
  for (const Json& backend : json["backends"]) {
    if (!backend["usable"].get<bool>()) continue;
    EXPECT_EQ(backend["support"].size(), operation_names().size());
    EXPECT_EQ(backend["support"]["paged_mqa_topk"]["fp8"], "ok") << backend["name"];
    EXPECT_EQ(backend["support"]["topk"]["any"], "ok") << backend["name"];
  }
}

TEST_F(Cli, WrongUsageIsBadInput) {
  EXPECT_EQ(run_command("").code, 2);
  EXPECT_EQ(run_command("fly").code, 2);
  EXPECT_EQ(run_command("run").code, 2);
  EXPECT_EQ(run_command("run x --topk 0").code, 2);
  EXPECT_EQ(run_command("check").code, 2);
  EXPECT_EQ(run_command("check --random --op topkk").code, 2);
  EXPECT_EQ(run_command("check --random --cases 1 --seed -1").code, 2);
  EXPECT_EQ(run_command("check --random --cases 1 --seed 18446744073709551616").code, 2);
  EXPECT_EQ(run_command("make-trace").code, 2);
  EXPECT_EQ(run_command("--help").code, 0);
  EXPECT_EQ(run_command("run --help").code, 0);
  EXPECT_THAT(run_command("--version").out, HasSubstr(TOPKEY_VERSION));
}

/// `op` in a small shape: make-trace takes the options that say something of it.
std::string small_shape(const std::string& op) {
  const auto is_one_of = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* name) { return op == name; });
  };
  const bool scores = op.find("mqa") != std::string::npos, pages = op.rfind("paged", 0) == 0 || op == "gather_k";
  const bool pools = is_one_of({"pool_k", "compress_k"}), keys = pages || pools || is_one_of({"quantize_k", "store_k"});
  const bool tables = is_one_of({"expand_rows", "to_slots"});
  std::string text = " --op " + op;
  if (scores || op == "quantize_q") text += " --heads 2";
  if (scores || keys || op == "quantize_q") text += " --head-dim 32";
  if (scores || !keys) text += " --rows 4";
  if (op != "quantize_q") text += " --keys 60";
  if (op.find("topk") != std::string::npos || is_one_of({"select_blocks", "to_slots", "expand_pools"}))
    text += " --topk 5";
  if (pages || pools || tables) text += " --requests 2";
  if (pages || pools || tables || op == "store_k") text += " --page-size 8";
  return text;
}

TEST_F(Cli, EveryOperationGoesFromMakeTraceThroughRunToCheck) {
  for (const std::string& op : operation_names()) {
    const std::string file = path(op), options = small_shape(op);
    ASSERT_EQ(run_command("make-trace -o " + file + options).code, 0) << op;
    ASSERT_EQ(run_command("make-trace -o " + file + "2" + options).code, 0) << op;
    EXPECT_EQ(file_text(file), file_text(file + "2")) << op << ": the same arguments must give the same bytes";
    const Outcome ran = run_command("run " + file + " --backend ref -o " + path("done"));
    EXPECT_EQ(ran.code, 0) << op << "\n" << ran.err;
    const Trace before = read_trace(file), after = read_trace(path("done"));
    EXPECT_EQ(after.metadata.at("backend"), "ref");
    const Call call(std::make_shared<Trace>(before));
    for (const auto& [name, tensor] : call.outputs()) EXPECT_NE(after.find(name), nullptr) << op << " " << name;
    const Trace again = trace_of(call.args());
    for (const auto& [name, tensor] : again.tensors) {
      const TraceTensor* given = before.find(name);
      if (given != nullptr) {
        EXPECT_EQ(given->bytes, tensor.bytes) << op << " " << name;
      }
      EXPECT_TRUE(given != nullptr || name == "cache")
          << op << " " << name << ": only store_k makes a tensor that is missing";
    }
    const Outcome checked = run_command("check " + file);
    EXPECT_EQ(checked.code, 0) << op << "\n" << checked.out << checked.err;
  }
}

TEST_F(Cli, RunCanBeReadByAScript) {
  const std::string file = small_trace();
  const Outcome outcome = run_command("run --json --backend ref " + file);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["backend"], "ref");
  EXPECT_EQ(json["rows"], 4);
  EXPECT_GT(json["keys_per_second"], 0);
  EXPECT_EQ(json["indices_as_expected"], 1);
  EXPECT_EQ(json["synthetic"], true);
  EXPECT_FALSE(json["attention"].empty());
  const Json more = Json::parse(run_command("run --json --topk 50 " + file).out);
  EXPECT_EQ(more["count_max"], 50);
}

TEST_F(Cli, ABackendThatCannotBeUsedIsSaidLoudly) {
  const std::string file = small_trace();
  expect_refused("run " + file + " --backend nonsense", 3, "nonsense");
  expect_refused("check --random --backend nonsense", 3, "nonsense");
  expect_refused("run " + file, 3, "nonsense", "TOPKEY_BACKEND=nonsense");
}

TEST_F(Cli, ADifferenceIsShownAndIsExitCodeOne) {
  const std::string file = small_trace();
  EXPECT_EQ(run_command("check " + file).code, 0);
  Trace trace = read_trace(file);
  trace.tensors.at("expected_indices").as<int32_t>()[7] += 1;
  write_trace(file, trace);
  const Outcome outcome = run_command("check --backend ref " + file);
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("in column 2, row 1"));
  const Json json = Json::parse(run_command("check --json --backend ref " + file).out);
  EXPECT_EQ(json[0]["ok"], false);
}

TEST_F(Cli, RandomCasesAreEqual) {
  const Outcome outcome = run_command("check --random --cases 64 --seed 7");
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  EXPECT_EQ(run_command("check --random --cases 4 --op merge_topk --json").code, 0);
}

/// pool_k, the search over its keys, expand_pools and the layer, on every backend with a cache of its own.
TEST_F(Cli, RandomPoolsAreEqualFromEndToEnd) {
  const Outcome outcome = run_command("check --random --op pools --cases 100 --seed 21 --json");
  ASSERT_EQ(outcome.code, 0) << outcome.out << outcome.err;
  const Json json = Json::parse(outcome.out);
  std::set<std::string> seen;
  for (const Json& row : json["rows"]) {
    EXPECT_EQ(row["op"], "pools");
    EXPECT_EQ(row["cases"], 100);
    EXPECT_EQ(row["skipped"], 0) << row["backend"];
    EXPECT_GT(row["compared"], 1000000) << row["backend"];
    seen.insert(row["backend"]);
  }
  EXPECT_TRUE(seen.count("ref") == 1 && seen.count("cpu") == 1);
  // One dim, whose window cancels to a millionth of its terms.
  EXPECT_EQ(run_command("check --random --op compress_k --seed 32507105 --cases 1").code, 0);
}

TEST_F(Cli, HostileFilesGetASentence) {
  expect_refused("run " + path("none"), 2, "no such file");
  expect_refused("run " + path(""), 2, "not a regular file");
  expect_refused("run /dev/zero", 2, "not a regular file");
  expect_refused("check " + write("empty", ""), 2, "too short");
  expect_refused("run " + write("ones", std::string(100, '\xFF')), 2, "header");
  expect_refused("run " + write("bomb", std::string("\x40\x42\x0F\0\0\0\0\0", 8) + std::string(1000000, '[')), 2,
                 "JSON object");
  expect_refused("run " + write("nothing", std::string("\2\0\0\0\0\0\0\0{}", 10)), 2, "'op'");
  const std::string whole = file_text(small_trace());
  for (size_t size = 1; size < whole.size(); size += whole.size() / 12)
    expect_refused("check " + write("cut", whole.substr(0, size)), 2);
}

TEST_F(Cli, WrongCallsGetASentence) {
  const Trace good = read_trace(small_trace());
  const auto with = [&](const std::string& key, const std::string& value) {
    Trace trace = good;
    trace.metadata[key] = value;
    write_trace(path("wrong"), trace);
    return path("wrong");
  };
  for (const char* command : {"run ", "check "}) {
    expect_refused(command + with("op", "fly"), 2, "op");
    expect_refused(command + with("topk", "-5"), 2);
    expect_refused(command + with("topk", "2147483647"), 2);
    expect_refused(command + with("count", "1000000"), 2);
    expect_refused(command + with("page_size", "1000000"), 2);
    expect_refused(command + with("head_dim", "7"), 2);
    expect_refused(command + with("format", "q8_0"), 2);
    expect_refused(command + with("heads", "3"), 2, "heads");
    expect_refused(command + with("next_n", "3"), 2);
  }
  Trace trace = good;
  trace.tensors.erase("q");
  write_trace(path("wrong"), trace);
  expect_refused("run " + path("wrong"), 2, "q");
  trace = good;
  trace.metadata["text"] = "[1,2";
  write_trace(path("wrong"), trace);
  expect_refused("run " + path("wrong"), 2, "text");
  expect_refused("run " + small_trace() + " -o /dev/null", 2, "regular file");
}

TEST_F(Cli, ARealTraceShowsAttentionAndText) {
  const std::string file = TOPKEY_SOURCE_DIR "/data/smollm2_layer07.safetensors";
  if (!fs::exists(file)) GTEST_SKIP() << "no " << file;
  const Outcome outcome = run_command("run --backend ref " + file);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* words :
       {"backend ref", "store_k", "keys/s", "recall", "best mass", "what query row", "equal, bit for bit"}) {
    EXPECT_THAT(outcome.out, HasSubstr(words));
  }
  EXPECT_EQ(outcome.out.find('\033'), std::string::npos) << "no colours where there is no terminal";
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(run_command("check --rows 4 " + file).code, 0);
}

TEST_F(Cli, RunsOnRanks) {
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
  const std::string dense = path("dense.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + dense + " --op mqa_topk --rows 2 --keys 30").code, 0);
  expect_refused("run " + dense + " --ranks 2", 2, "--ranks wants a trace of paged_mqa_topk");
}

/// Keys that are pools: the layer over them, whose answer is tokens.
TEST_F(Cli, RunsPoolsOnRanks) {
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
    // A score and a position of each of 40 pools and not of 160 tokens; 2 KiB to agree.
    EXPECT_EQ(received["context"], 3 * 2 * (9 * 40 * 8 + 2048));
  }
  EXPECT_THAT(
      run_command("run " + trace + " --ranks 2").out,
      AllOf(HasSubstr("keys are pools of 4 tokens"), HasSubstr("equal to the answer of one rank, bit for bit")));
  Trace wrong = read_trace(trace);
  wrong.tensors.erase("positions");
  write_trace(trace, wrong);
  EXPECT_EQ(run_command("run " + trace + " --ranks 2").code, 0) << "without an open pool";
  for (const std::string size : {"0", "-4", "x", "4.5", "999999999"}) {
    wrong.metadata["pool_size"] = size;
    write_trace(trace, wrong);
    expect_refused("run " + trace + " --ranks 2", 2, "--ranks wants a pool_size from 1 on");
  }
  expect_refused("make-trace -o " + trace + " --pool-size 4 --windows random --keys 300 --rows 9", 2,
                 "windows must begin at 0 with --pool-size");
  expect_refused("make-trace -o " + trace + " --op mqa_topk --pool-size 4", 2, "--pool-size must be absent");
}

TEST_F(Cli, RanksTakeEveryCache) {
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

TEST_F(Cli, GatheredRowsOfAWildIndptrAreHeldAgainstNothing) {
  const std::string trace = path("gather.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + trace + " --op gather_k --keys 20 --requests 2").code, 0);
  Trace wild = read_trace(trace);
  ASSERT_NE(wild.find("indptr"), nullptr);
  wild.tensors.at("indptr").as<int32_t>()[0] = -2000000000;
  write_trace(trace, wild);
  EXPECT_EQ(run_command("check " + trace).code, 0);
}

TEST_F(Cli, ManyRanksOnThreadsEnd) {
  const std::string trace = path("ranks.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + trace + " --rows 8 --keys 4096 --topk 512 --heads 4 --head-dim 32").code, 0);
  for (const std::string cut : {"context", "rows", "prefill"}) {
    const Outcome outcome = run_command("run " + trace + " --ranks 256 --json --shard " + cut);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(Json::parse(outcome.out)["equal"], true) << cut;
  }
  expect_refused("run " + trace + " --ranks 0", 2, "--ranks must be from 1 to 1024 without mpirun, got 0");
}

TEST_F(Cli, AnOptionThatWouldDoNothingIsRefused) {
  const std::string trace = small_trace();
  expect_refused("check " + trace + " --op topk", 2, "check: --op must be absent with traces");
  expect_refused("check " + trace + " --save " + path("bug"), 2, "check: --save must be absent with traces");
  expect_refused("check " + trace + " --seed 3", 2, "check: --seed must be absent with traces");
  expect_refused("check " + trace + " --cases 3", 2, "check: --cases must be absent with traces");
  expect_refused("check --random --rows 3", 2, "check: --rows must be absent with --random");
  const std::string make = "make-trace -o " + path("strided") + " --page-size 4 --head-dim 32 --heads 2 --page-stride ";
  expect_refused(make + "3", 2, "make-trace: page-stride must be 0, or a multiple of 4 from 144 to 288 bytes, got 3");
  expect_refused(make + "146", 2, "got 146");
  expect_refused(make + "292", 2, "got 292");
  ASSERT_EQ(run_command(make + "148").code, 0);
  EXPECT_EQ(read_trace(path("strided")).metadata.at("page_stride"), "148");
}

/// What make-trace is told changes what it writes, whatever the operation, or is refused.
TEST_F(Cli, AnOptionThatIsNoneOfTheOperationIsRefusedByMakeTrace) {
  const auto contents = [&] {
    Trace trace = read_trace(path("made"));
    trace.metadata["pattern"] = "";  // a word that every trace has
    write_trace(path("made"), trace);
    return file_text(path("made"));
  };
  int64_t refused = 0, changed = 0;
  for (const std::string& op : operation_names()) {
    const std::string make = "make-trace -o " + path("made") + small_shape(op);
    ASSERT_EQ(run_command(make).code, 0) << op;
    const std::string before = contents();
    for (const std::string option :
         {"--format mxfp4", "--heads 3", "--head-dim 64", "--rows 6", "--keys 70", "--topk 6", "--requests 3",
          "--page-size 16", "--layout interleaved", "--page-stride 400", "--next-n 2", "--pattern ties_at_cut",
          "--scale f32", "--windows random", "--exact", "--expected"}) {
      const std::string name = option.substr(0, option.find(' '));
      // The last one counts; --rows follows from --next-n.
      std::string command = make;
      if (const size_t at = command.find(" " + name + " "); at != std::string::npos)
        command.erase(at, command.find(' ', at + name.size() + 2) - at);
      if (name == "--next-n" && command.find(" --rows 4") != std::string::npos)
        command.erase(command.find(" --rows 4"), 9);
      const Outcome outcome = run_command(command + " " + option);
      if (outcome.code == 0) {
        EXPECT_TRUE(contents() != before) << op << " " << option;
        ++changed;
      } else {
        expect_refused(
            command + " " + option, 2,
            "make-trace: " + name + " must be absent with --op " + op + ", which has no use for it; got one");
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(changed, 80);
  const std::string make = "make-trace -o " + path("made");
  expect_refused(make + " --op topk --format mxfp4", 2, "--format must be absent with --op topk");
  expect_refused(make + " --op mqa_topk --page-size 3", 2, "--page-size must be absent with --op mqa_topk");
  expect_refused(make + " --requests 3 --next-n 2 --rows 5", 2, "rows must be requests * next-n, 6, or absent; got 5");
  expect_refused(make + " --op pool_k --head-dim 96", 2, "head-dim must be a power of two for pool_k, got 96");
  expect_refused(make + " --op expand_pools --topk 2147483647", 2, "more than 4 GB");
  EXPECT_EQ(run_command(make + " --requests 3 --next-n 2 --rows 6 --keys 50").code, 0);
}

TEST_F(Cli, BenchAgainstPeersNeedsItsPackages) {
  write("torch.py", "raise ImportError('none here')\n");
  expect_refused("bench --against vllm", 3, "bench: --against needs the Python packages topkey and torch",
                 "PYTHONPATH=" + path(""));
}

TEST_F(Cli, BenchRefusesACaseThatItDoesNotHave) {
  expect_refused("bench --only nope", 2, "--only must be (part of) a case's name, got nope");
  expect_refused("bench --suite producers --backend cpu --only decode", 2, "got decode");
}

/// Producers and pools have rows of their own: bytes beside a copy of as many, in the format of every other row.
TEST_F(Cli, BenchHasRowsOfProducersAndPools) {
  const std::string bench = "bench --suite producers --backend cpu --quick --threads 1 --json " + path("rows.json");
  const Outcome outcome = run_command(bench);
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json json = Json::parse(file_text(path("rows.json")));
  EXPECT_TRUE(json.contains("device") && json.contains("commit") && json.contains("date"));
  EXPECT_GT(json["ceilings"]["copy_gbytes"], 0);
  std::map<std::string, std::set<std::string>> formats;
  for (const Json& row : json["rows"]) {
    for (const char* name : {"op",      "backend",   "arithmetic",      "numerics", "format",   "heads",   "head_dim",
                             "rows",    "keys",      "next_n",          "topk",     "pattern",  "threads", "heat",
                             "graph",   "median_us", "min_us",          "floor_us", "fraction", "peer",    "peer_us",
                             "must_us", "target_us", "workspace_bytes", "rescans",  "util"}) {
      EXPECT_TRUE(row.contains(name)) << name;
    }
    const double floor = row["floor_us"], median = row["median_us"], fraction = row["fraction"], bytes = row["bytes"],
                 copy = row["copy_gbytes"];
    EXPECT_NEAR(floor, bytes / copy / 1e3, 1e-9 * floor) << row["case"];
    EXPECT_NEAR(fraction, floor / median, 1e-9 * fraction) << row["case"];
    EXPECT_LE(row["min_us"], median) << row["case"];
    EXPECT_GT(row["rows"], 0) << row["case"];
    EXPECT_EQ(row["backend"], "cpu");
    EXPECT_THAT(outcome.out, HasSubstr(row["case"].get<std::string>()));
    formats[row["op"]].insert(row["format"].is_null() ? "" : row["format"].get<std::string>());
  }
  const std::set<std::string> both = {"fp8", "mxfp4"};
  const std::map<std::string, std::set<std::string>> want = {
      {"quantize_q", both}, {"quantize_k", both}, {"store_k", both},     {"gather_k", both},
      {"pool_k", both},     {"compress_k", both}, {"expand_pools", {""}}};
  EXPECT_EQ(formats, want);
}

TEST_F(Cli, TellsWhatShardingWouldCost) {
  const Outcome outcome = run_command("scale --context 131072 --rows 64 --requests 64 --ranks 4");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("model, not measured"));
  // Three others send 64 rows of 2048 winners, 8 bytes each.
  EXPECT_THAT(outcome.out, HasSubstr(std::to_string(3 * 64 * 2048 * 8)));
  // The largest of everything stays in 63 bits; what is larger is refused.
  const std::string most =
      "scale --context 2147483647 --ranks 1048576 --rows 1048576 --topk 65536 --requests 1048576 --key-bytes 2048 "
      "--blocks 65536 --interleave 1024 --shard ";
  for (const char* cut : {"context", "rows", "prefill"}) {
    const Outcome large = run_command(most + cut);
    EXPECT_EQ(large.code, 0) << cut;
    EXPECT_EQ(large.out.find(" -"), std::string::npos) << large.out;
  }
  EXPECT_EQ(run_command("scale --context 2147483648").code, 2);
  expect_refused("scale --context 9 --tflops nan", 2, "must be numbers, got nan");
}

}  // namespace
}  // namespace topkey::testing
