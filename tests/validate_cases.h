// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// "Each argument of each operation wrong in turn: a worded error, nothing written." A Subject is one valid call and a
// table of its tensors; every entry is made wrong in every way that its row of the table allows (dtype, rank, extents,
// strides, alignment, absence), one at a time, then a list of wrong numbers and combinations. validate_*_test.cpp hold
// the tables.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <string>
#include <vector>

#include "support/array.h"
#include "support/run.h"
#include "tests/testing.h"
#include "topkey/topkey.h"

namespace topkey::testing {

/// The memory of a call. After seal() it can tell whether any byte has changed, and put it back.
class Arena {
 public:
  Tensor in(DType dtype, std::initializer_list<int64_t> shape) {
    pieces_.push_back({Array(dtype, shape), {}});
    return pieces_.back().array.view();
  }
  Tensor ints(const std::vector<int32_t>& values) {
    pieces_.push_back({Array::of(values), {}});
    return pieces_.back().array.view();
  }
  Tensor out(DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor t = in(dtype, shape);
    std::memset(t.data, 0xA5, pieces_.back().array.bytes());
    return t;
  }
  void seal() {
    for (Piece& p : pieces_) p.bytes.assign(p.array.as<uint8_t>(), p.array.as<uint8_t>() + p.array.bytes());
  }
  bool changed() const {
    for (const Piece& p : pieces_) {
      if (std::memcmp(p.array.as<uint8_t>(), p.bytes.data(), p.bytes.size()) != 0) return true;
    }
    return false;
  }
  void restore() {
    for (Piece& p : pieces_) std::memcpy(p.array.as<uint8_t>(), p.bytes.data(), p.bytes.size());
  }

 private:
  struct Piece {
    Array array;
    std::vector<uint8_t> bytes;
  };
  std::vector<Piece> pieces_;
};

enum TensorTrait : unsigned { kRequired = 1, kUnitStride = 2, kWritten = 4 };

/// A tensor argument. dims has a character a dimension: '=' exactly this extent, '>' at least, '*' free, '?' free in
/// itself, but other arguments follow it, so that they are the ones found wrong.
template <class Args>
struct TensorArg {
  const char* name;
  Tensor& (*get)(Args&);
  std::vector<DType> dtypes;
  const char* dims;
  unsigned traits;
};
#define TOPKEY_TENSOR(Args, field) #field, [](Args & a) -> topkey::Tensor& { return a.field; }

/// One other mistake; `argument` is how its sentence goes on after "operation: " ("" = any argument).
template <class Args>
struct Wrong {
  const char* what;
  std::string argument;
  std::function<void(Args&)> make;
  bool needs_data = false;  ///< shapes alone do not show it
};

template <class Args>
struct Subject {
  Args args{};
  Arena arena;
  std::vector<TensorArg<Args>> tensors;
  std::vector<Wrong<Args>> wrongs;

  void tensor(const char* name, Tensor& (*get)(Args&), std::vector<DType> dtypes, const char* dims,
              unsigned traits = 0) {
    tensors.push_back({name, get, std::move(dtypes), dims, traits});
  }
  void wrong(const char* what, std::string argument, std::function<void(Args&)> make) {
    wrongs.push_back({what, std::move(argument), std::move(make)});
  }
};

/// Every mistake that a tensor of this kind admits.
template <class Args>
std::vector<Wrong<Args>> mistakes(const TensorArg<Args>& t, Args& valid) {
  std::vector<Wrong<Args>> list;
  const auto add = [&](const std::string& argument, std::function<void(Tensor&)> change, const char* what,
                       bool needs_data = false) {
    list.push_back({what, argument, [get = t.get, change](Args& a) { change(get(a)); }, needs_data});
  };
  const std::string own = std::string(t.name) + " must ";
  for (int d = -1; d <= 10; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (std::find(t.dtypes.begin(), t.dtypes.end(), dtype) != t.dtypes.end()) continue;
    add(
        own, [dtype](Tensor& x) { x.dtype = dtype; }, "dtype", dtype == DType::none);
  }
  const Tensor& now = t.get(valid);
  for (int rank : {-1, 0, now.ndim - 1, now.ndim + 1, 5}) {
    if (rank != now.ndim)
      add(
          own, [rank](Tensor& x) { x.ndim = rank; }, "rank");
  }
  for (int i = 0; i < now.ndim; ++i) {
    const char kind = t.dims[i];
    const std::string argument = kind == '?' ? "" : own;
    add(
        kind == '?' ? "" : own, [i](Tensor& x) { x.shape[i] = -1; }, "negative extent");
    if (kind != '*')
      add(
          argument, [i](Tensor& x) { --x.shape[i]; }, "smaller extent");
    if (kind == '=' || kind == '?')
      add(
          argument, [i](Tensor& x) { ++x.shape[i]; }, "larger extent");
  }
  const int last = now.ndim - 1;
  if ((t.traits & kUnitStride) && now.shape[last] > 1) {
    for (int64_t stride : {0, 2, -1})
      add(
          own, [last, stride](Tensor& x) { x.stride[last] = stride; }, "last stride");
  }
  if ((t.traits & kWritten) && now.shape[0] > 1)
    add(
        own, [](Tensor& x) { x.stride[0] = 0; }, "overlapping elements");
  if (support::dtype_bytes(now.dtype) > 1) {
    add(
        own, [](Tensor& x) { x.data = static_cast<uint8_t*>(x.data) + 1; }, "misaligned", true);
  }
  if (t.traits & kRequired) {
    add(
        own, [](Tensor& x) { x.data = nullptr; }, "no data", true);
    add(
        own, [](Tensor& x) { x = Tensor{}; }, "absent");
  }
  return list;
}

/// Runs one mistake: the sentence, the status, the queries, and that no byte has changed.
template <class Args>
void expect_refused(Subject<Args>& s, const Wrong<Args>& wrong, const std::string& tensor, const Exec& given) {
  Args args = s.args;
  wrong.make(args);
  uint64_t stats[kNumStats] = {};
  Exec exec = given;
  exec.stats = stats;
  const std::string where = std::string(op_name(args)) + ", " + tensor + " " + wrong.what;
  const Thrown thrown = thrown_by([&] { launch(args, exec); });
  EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(Status::invalid_argument))
      << where << ": " << thrown.sentence;
  const std::string begin = std::string(op_name(args)) + ": " + wrong.argument;
  EXPECT_EQ(thrown.sentence.rfind(begin, 0), 0u)
      << where << ": want \"" << begin << "...\", got \"" << thrown.sentence << "\"";
  EXPECT_NE(thrown.sentence.find(" must "), std::string::npos) << where << ": " << thrown.sentence;
  EXPECT_NE(thrown.sentence.find(", got "), std::string::npos) << where << ": " << thrown.sentence;
  EXPECT_FALSE(s.arena.changed()) << where << ": something was written";
  for (uint64_t word : stats) EXPECT_EQ(word, 0u) << where << ": statistics of a call that did not run";
  s.arena.restore();
  if (wrong.needs_data) return;
  EXPECT_NE(unsupported(args, exec), nullptr) << where << ": unsupported says that it can run";
  EXPECT_EQ(static_cast<int>(thrown_by([&] { workspace_bytes(args, exec); }).status),
            static_cast<int>(Status::invalid_argument))
      << where;
}

/// The valid call runs, or is refused for what it asks of the backend; sizes are the same without data.
template <class Args>
void expect_valid(Subject<Args>& s, const Exec& exec) {
  const std::string reason = unsupported(s.args, exec) ? unsupported(s.args, exec) : "";
  const Thrown thrown = thrown_by([&] { reason.empty() ? support::run(s.args, exec) : launch(s.args, exec); });
  EXPECT_EQ(static_cast<int>(thrown.status), static_cast<int>(reason.empty() ? Status::ok : Status::unsupported))
      << thrown.sentence << reason;
  EXPECT_EQ(thrown.sentence, reason);
  EXPECT_EQ(s.arena.changed(), reason.empty()) << op_name(s.args) << ": a valid call writes, a refused one does not";
  s.arena.restore();
  Args shapes = s.args;
  for (const TensorArg<Args>& t : s.tensors) t.get(shapes).data = nullptr;
  EXPECT_EQ(unsupported(shapes, exec) ? unsupported(shapes, exec) : "", reason) << op_name(s.args) << " without data";
  if (reason.empty()) {
    EXPECT_EQ(workspace_bytes(shapes, exec), workspace_bytes(s.args, exec)) << op_name(s.args) << " without data";
  }
}

/// Everything, and how much it was.
template <class Args>
void check_subject(Subject<Args>& s, const Exec& exec) {
  s.arena.seal();
  expect_valid(s, exec);
  size_t count = s.wrongs.size();
  for (const TensorArg<Args>& t : s.tensors) {
    const auto list = mistakes(t, s.args);
    for (const Wrong<Args>& wrong : list) expect_refused(s, wrong, t.name, exec);
    count += list.size();
  }
  for (const Wrong<Args>& wrong : s.wrongs) expect_refused(s, wrong, "", exec);
  std::cout << op_name(s.args) << ": " << count << " wrong calls, " << s.tensors.size() << " tensors\n";
}

// ---- tables that operations share ----
const inline std::vector<DType> kFloatTypes = {DType::f32, DType::bf16, DType::f16},
                                kWeightTypes = {DType::f32, DType::bf16}, kI32Only = {DType::i32},
                                kIntTypes = {DType::i32, DType::i64}, kF32Only = {DType::f32},
                                kCodeTypes = {DType::f8_e4m3fn, DType::u8},
                                kMaskTypes = {DType::b8, DType::f32, DType::f16};

template <class Args>
void shard_wrongs(Subject<Args>& s, Shard& (*get)(Args&)) {
  s.wrong("world_size -1", "shard.world_size must ", [get](Args& a) { get(a).world_size = -1; });
  s.wrong("interleave -1", "shard.interleave must ", [get](Args& a) { get(a) = {0, 2, -1}; });
  s.wrong("rank -1", "shard.rank must ", [get](Args& a) { get(a) = {-1, 2, 1}; });
  s.wrong("rank = world_size", "shard.rank must ", [get](Args& a) { get(a) = {2, 2, 1}; });
  s.wrong("a rank without a world", "shard.rank must ", [get](Args& a) { get(a) = {1, 0, 0}; });
}

template <class Args>
void rope_table(Subject<Args>& s, int64_t rows, int32_t dim) {
  s.args.rope = {s.arena.in(DType::i32, {rows}), s.arena.in(DType::f32, {5, dim}), dim, false, false};
  s.tensor(TOPKEY_TENSOR(Args, rope.positions), kIntTypes, ">", kRequired);
  s.tensor(TOPKEY_TENSOR(Args, rope.cos_sin), kFloatTypes, "*=", kRequired | kUnitStride);
  s.wrong("odd", "rope.dim must ", [](Args& a) { a.rope.dim = 3; });
  s.wrong("negative", "rope.dim must ", [](Args& a) { a.rope.dim = -2; });
  s.wrong("past head_dim", "rope.dim must ", [](Args& a) { a.rope.dim = 4096; });
  s.wrong("table without dim", "rope.", [](Args& a) { a.rope.dim = 0; });
}

}  // namespace topkey::testing
