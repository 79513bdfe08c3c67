// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A call as a trace and back: the same arguments, the same results; and traces whose names or numbers are wrong get a
// sentence.
#include "support/call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/backend_test.h"
#include "tests/testing.h"

namespace topkey::testing {
namespace {

using ::testing::HasSubstr;

std::shared_ptr<const Trace> shared(Trace trace) { return std::make_shared<const Trace>(std::move(trace)); }

/// The sentence with which a trace is refused; "" if it is not.
std::string refusal(Trace trace, const std::string& backend = "") {
  try {
    const Call call(shared(std::move(trace)));
    Exec exec{};
    if (!backend.empty()) exec.backend = backend.c_str(), call.run(exec);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

Problem paged_problem(KeyFormat format, Addressing addressing, Layout layout = Layout::planar) {
  ProblemSpec spec;
  spec.format = format;
  spec.paged = true;
  spec.requests = 3, spec.rows = 6, spec.next_n = 2, spec.page_size = 4, spec.addressing = addressing;
  spec.windows = Windows::random;
  spec.layout = layout;
  if (tile_rows(layout) > 0) spec.page_size = static_cast<int32_t>(tile_rows(layout)), spec.head_dim = 128;
  spec.page_stride = (spec.page_size * row_bytes(format, spec.head_dim) + 3) / 4 * 4 + 8;
  spec.table_step = 2;
  return make_problem(spec);
}

class CallOnBackend : public BackendTest {};

TEST_P(CallOnBackend, APagedSearchGivesTheResultsOfTheCallItIs) {
  for (const auto& [format, layout] : {std::pair{KeyFormat::fp8, Layout::planar},
                                       {KeyFormat::mxfp4, Layout::planar},
                                       {KeyFormat::bf16, Layout::planar},
                                       {KeyFormat::f16, Layout::interleaved},
                                       {KeyFormat::f32, Layout::planar},
                                       {KeyFormat::q8_0, Layout::planar},
                                       {KeyFormat::fp8_fnuz, Layout::interleaved},
                                       {KeyFormat::fp8_fnuz, Layout::tiled16},
                                       {KeyFormat::mxfp4, Layout::tiled16},
                                       {KeyFormat::mxfp4, Layout::tiled32},
                                       {KeyFormat::mxfp4, Layout::tiled64}}) {
    for (const Addressing addressing : {Addressing::request, Addressing::q_indptr, Addressing::next_n}) {
      const Problem p = paged_problem(format, addressing, layout);
      Want want;
      want.scores = want.counts = true;
      want.blocks = 3, want.block_size = 5;
      const Outputs outputs(p.count(), 7, want);
      PagedMqaTopk args = p.paged_search(7, outputs.selection());
      args.admit.force_last = 2;
      run(args, exec());
      const Call call(shared(trace_of(args)));
      EXPECT_EQ(call.op(), "paged_mqa_topk");
      call.run(exec());
      for (const auto& [name, tensor] : output_tensors(args)) {
        ASSERT_NE(call.output(name), nullptr) << name;
        EXPECT_EQ(call.output(name)->bytes, copy_of(tensor).bytes) << name << ", " << p.text();
      }
    }
  }
}

TOPKEY_ON_EVERY_BACKEND(CallOnBackend);

Trace selection_trace() {
  Trace trace;
  trace.metadata = {{"op", "topk"}, {"topk", "2"}, {"out", "indices,scores"}, {"note", "kept"}};
  trace.tensors["scores"] = make_tensor("F32", {1, 4});
  const float scores[] = {1, 4, 2, 3};
  std::memcpy(trace.tensors["scores"].bytes.data(), scores, sizeof scores);
  return trace;
}

TEST(Call, AnOutputThatHasAnInputsNameStandsBesideIt) {
  Trace trace = selection_trace();
  const Call call(shared(trace));
  call.run(on("ref"));
  call.write_back(trace);
  ASSERT_NE(trace.find("out.scores"), nullptr);
  EXPECT_EQ(trace.find("scores")->as<float>()[0], 1.F);
  EXPECT_EQ(trace.find("out.scores")->as<float>()[0], 4.F);
  EXPECT_EQ(call.output("scores"), &call.outputs().at("out.scores"));
  EXPECT_EQ(trace.find("indices")->as<int32_t>()[0], 1);
  EXPECT_EQ(trace.find("indices")->as<int32_t>()[1], 3);
  EXPECT_EQ(trace.metadata.at("note"), "kept");
}

TEST(Call, OptionsReplaceMetadata) {
  const Call call(shared(selection_trace()), {{{"topk", "3"}, {"order", "score"}, {"out", "indices"}}});
  call.run(on("ref"));
  ASSERT_EQ(call.output("indices")->shape, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(call.output("indices")->as<int32_t>()[2], 2);
  EXPECT_EQ(call.output("scores"), nullptr);
}

TEST(Call, WrongMetadataIsNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"op", "topkk"}, {"order", "up"}, {"topk", "two"},        {"topk", "99999999999"},
      {"topk", "-1"},  {"fill", ""},    {"force_first", "1e3"}, {"slot_map.table_per_row", "maybe"}};
  for (const auto& [key, value] : cases) {
    Trace trace = selection_trace();
    trace.metadata[key] = value;
    EXPECT_THAT(refusal(trace, "ref"), ::testing::AnyOf(HasSubstr(key), HasSubstr("output"))) << value;
  }
}

TEST(Call, MissingAndOddTensorsAreNamed) {
  Trace trace = selection_trace();
  trace.tensors.erase("scores");
  EXPECT_THAT(refusal(trace, "ref"), HasSubstr("scores"));
  trace.tensors["scores"] = make_tensor("F64", {1, 4});
  EXPECT_THAT(refusal(trace), HasSubstr("F64"));
  trace.tensors["scores"] = make_tensor("F32", {1, 1, 1, 1, 4});
  EXPECT_THAT(refusal(trace), HasSubstr("at most 4 dimensions"));
  trace.tensors["scores"] = make_tensor("F32", {0, 4});
  EXPECT_EQ(refusal(trace, "ref"), "") << "no rows: nothing to do";
}

TEST(Call, AFewBytesDoNotTakeTheMachinesMemory) {
  Trace trace = selection_trace();
  trace.metadata["topk"] = "2000000000";
  trace.metadata["count"] = "2000000000";
  EXPECT_THAT(refusal(trace), HasSubstr("cannot be allocated"));
}

TEST(Call, HeadsAndPageStrideAreHeldAgainstTheTensors) {
  const Problem p = paged_problem(KeyFormat::fp8, Addressing::request);
  const Outputs outputs(p.count(), 3, {});
  const Trace trace = trace_of(p.paged_search(3, outputs.selection()));
  EXPECT_EQ(trace.metadata.at("heads"), "4");
  EXPECT_EQ(refusal(trace, "ref"), "");
  Trace heads = trace, stride = trace;
  heads.metadata["heads"] = "5";
  EXPECT_THAT(refusal(heads), HasSubstr("heads"));
  stride.metadata["page_stride"] = "4";
  EXPECT_THAT(refusal(stride), HasSubstr("page_stride"));
}

TEST(Call, ShortTensorsAreRefusedByTheLibrary) {
  const Problem p = paged_problem(KeyFormat::fp8, Addressing::request);
  const Outputs outputs(p.count(), 3, {});
  const Trace trace = trace_of(p.paged_search(3, outputs.selection()));
  for (const char* name : {"weights", "ends", "row_request", "cache"}) {
    Trace cut = trace;
    TraceTensor& tensor = cut.tensors.at(name);
    tensor = make_tensor(tensor.dtype, {tensor.shape[0] - 1, tensor.shape.size() > 1 ? tensor.shape[1] - 1 : 1});
    cut.metadata.erase("page_stride");
    EXPECT_NE(refusal(cut, "ref"), "") << name;
  }
}

}  // namespace
}  // namespace topkey::testing
