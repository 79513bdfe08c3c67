// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The built command, as a user or a script meets it: exit codes, --json, hostile files, every operation from make-trace
// through run to check. A complaint is one line on stderr; no exception and no signal ends the program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "support/call.h"
#include "tests/cli.h"

namespace topkey::testing {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

class Cli : public CliTest {};

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

TEST_F(Cli, GatheredRowsOfAWildIndptrAreHeldAgainstNothing) {
  const std::string trace = path("gather.safetensors");
  ASSERT_EQ(run_command("make-trace -o " + trace + " --op gather_k --keys 20 --requests 2").code, 0);
  Trace wild = read_trace(trace);
  ASSERT_NE(wild.find("indptr"), nullptr);
  wild.tensors.at("indptr").as<int32_t>()[0] = -2000000000;
  write_trace(trace, wild);
  EXPECT_EQ(run_command("check " + trace).code, 0);
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
        expect_refusal(
            outcome, command + " " + option, 2,
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

}  // namespace
}  // namespace topkey::testing
