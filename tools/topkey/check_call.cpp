// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Large calls are checked a few rows at a time (chunks.h), so that no [rows, keys] matrix of doubles is held.
#include "check_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <type_traits>

#include "chunks.h"
#include "command.h"
#include "study.h"
#include "support/array.h"

namespace topkey::cli {
namespace {

using support::Report;
using support::Trace;
using support::TraceTensor;

/// What the trace says about its data.
struct Nature {
  bool exact, random_normal, real;
  explicit Nature(const Trace& trace)
      : exact(trace.text("exact", "0") == "1"),
        random_normal(trace.text("pattern", "") == "normal"),
        real(trace.text("model", "synthetic") != "synthetic") {}
  double calc_limit() const { return exact || random_normal ? 5e-6 : 0; }
};

using Snapshot = std::vector<std::pair<std::string, TraceTensor>>;

Snapshot snapshot(const support::CallArgs& args) {
  Snapshot copies;
  for (const auto& [name, tensor] : support::output_tensors(args)) copies.emplace_back(name, support::copy_of(tensor));
  return copies;
}

/// So that an output which a call fails to write is not taken for right.
void poison(const support::CallArgs& args) {
  for (const auto& [name, t] : support::output_tensors(args)) {
    const int64_t rows = t.ndim == 0 ? 0 : t.shape[0],
                  columns = t.ndim < 2 ? 1 : t.shape[1] * (t.ndim < 3 ? 1 : t.shape[2]);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t width = static_cast<int64_t>(support::dtype_bytes(t.dtype));
      std::memset(static_cast<std::byte*>(t.data) + r * t.stride[0] * width, 0xA5,
                  static_cast<size_t>(columns * width));
    }
  }
}

/// What a call goes on from stands among its outputs: it is put back.
bool is_state(const std::string& name) { return name == "tail" || name == "state"; }
void restore_state(const support::CallArgs& args, const Trace& trace) {
  for (const auto& [name, t] : support::output_tensors(args)) {
    const TraceTensor* found = is_state(name) ? trace.find(name) : nullptr;
    if (found != nullptr) std::memcpy(t.data, found->bytes.data(), found->bytes.size());
  }
}

/// Same bits in every output.
Report compare_bits(const std::string& name, const Snapshot& got, const Snapshot& want) {
  Report report;
  report.name = name;
  for (size_t i = 0; i < got.size() && i < want.size(); ++i) {
    const TraceTensor &a = got[i].second, &b = want[i].second;
    const auto width = static_cast<size_t>(support::dtype_bits(a.dtype)) / 8;
    const int64_t columns = a.shape.empty() ? 1 : std::max<int64_t>(1, a.count() / std::max<int64_t>(1, a.shape[0]));
    for (int64_t j = 0; j < std::min(a.count(), b.count()); ++j) {
      ++report.compared;
      const size_t at = static_cast<size_t>(j) * width;
      if (std::memcmp(a.bytes.data() + at, b.bytes.data() + at, width) == 0) continue;
      ++report.differing;
      const Tensor x = support::view(a, got[i].first), y = support::view(b, got[i].first);
      const auto shown_at = [&](const Tensor& t) {
        const Tensor flat = tensor(t.data, t.dtype, {a.count()});
        return t.dtype == DType::f32
                   ? fmt::format("{:.9g} (0x{:08X})", support::float_at(flat, j), bits_of(support::float_at(flat, j)))
               : width >= 4 ? std::to_string(support::int_at(flat, j))
                            : fmt::format("0x{:02X}", static_cast<int>(static_cast<const uint8_t*>(t.data)[at]));
      };
      report.fail(fmt::format("{} {}, expected {}, in column {}", got[i].first, shown_at(x), shown_at(y), j % columns),
                  j / columns);
    }
    if (a.shape != b.shape) report.fail(got[i].first + " has another shape");
  }
  return report;
}

/// S_ref against the same sum in long double, the other way round: the oracle must agree with itself.
Report compare_formulations(const support::Truth& truth) {
  Report report;
  report.name = "second formulation";
  report.rows = truth.rows;
  for (size_t i = 0; i < truth.a.size(); ++i) {
    const float ref = truth.ref.as<float>()[i];
    if (truth.a[i] < 0 || !std::isfinite(ref) || !std::isfinite(truth.wide[i])) continue;
    ++report.compared;
    const long double error = std::abs(static_cast<long double>(ref) - truth.wide[i]);
    const long double bound = std::abs(truth.wide[i]) * 0x1p-24L +
                              static_cast<long double>(truth.a[i]) * (truth.heads + truth.head_dim + 4) * 0x1p-52L +
                              0x1p-149L;
    if (error > 0) report.worst = std::max(report.worst, static_cast<double>(error / bound));
    if (error <= bound) continue;
    ++report.differing;
    const auto cell = static_cast<int64_t>(i);
    report.fail(fmt::format("score {:.9g}, in long double {:.12g}", ref, static_cast<double>(truth.wide[i])),
                cell / truth.width, cell % truth.width);
  }
  return report;
}

/// Rows of a call and what belongs to them.
struct Piece {
  support::CallArgs args;
  int64_t first, count;
};

class Checker {
 public:
  Checker(const support::Call& call, std::string backend)
      : call_(call), nature_(call.trace()), backend_(std::move(backend)), exec_(exec_on(backend_)) {}

  /// Adds what one piece shows to the reports of the pieces before it.
  void run(const Piece& piece, std::vector<Report>& reports) {
    uint64_t stats[kNumStats] = {};
    Exec counted = exec_;
    counted.stats = stats;
    clear(piece.args);
    support::run_args(piece.args, counted);
    const Snapshot first = snapshot(piece.args);
    std::vector<Report> found = std::visit([&](const auto& a) { return compare(a, piece, stats); }, piece.args);
    clear(piece.args);
    support::run_args(piece.args, exec_);
    found.push_back(compare_bits("repeat", snapshot(piece.args), first));
    if (backend_ != "ref" && (nature_.exact || is_producer(piece.args)) && !ambiguous(piece.args)) {
      const std::string ref = "ref";
      const Exec reference = exec_on(ref);
      clear(piece.args);
      support::run_args(piece.args, reference);
      found.push_back(compare_bits(nature_.exact ? "exact inputs" : "bytes of ref", first, snapshot(piece.args)));
    }
    merge(std::move(found), piece.first, reports);
  }

 private:
  template <class Args>
  static constexpr bool kScores = std::is_same_v<Args, MqaLogits> || std::is_same_v<Args, PagedMqaLogits>;
  template <class Args>
  static constexpr bool kSearches = std::is_same_v<Args, MqaTopk> || std::is_same_v<Args, PagedMqaTopk>;

  void clear(const support::CallArgs& args) const {
    poison(args);
    restore_state(args, call_.trace());
  }
  /// Its bytes must be those of `ref`: exp, which pools and windows call, may differ.
  static bool is_producer(const support::CallArgs& args) {
    if (std::holds_alternative<PoolK>(args) || std::holds_alternative<CompressK>(args)) return false;
    return std::visit(
        [](const auto& a) {
          return !requires { a.rows; };
        },
        args);
  }

  /// Rows that store_k is to put into one slot: backends may choose another of them.
  static bool ambiguous(const support::CallArgs& args) {
    const auto* store = std::get_if<StoreK>(&args);
    if (store == nullptr) return false;
    std::set<int64_t> slots;
    for (int64_t i = 0; i < store->slot_mapping.shape[0]; ++i) {
      const int64_t slot = support::int_at(store->slot_mapping, i);
      if (slot >= 0 && !slots.insert(slot).second) return true;
    }
    return false;
  }

  template <class Args>
  std::vector<Report> compare(const Args& a, const Piece& piece, const uint64_t* stats) {
    if constexpr (kScores<Args>) {
      return compare_scored(a, a, piece);
    } else if constexpr (kSearches<Args>) {
      return compare_search(a, piece, stats);
    } else if constexpr (requires { support::compare_selection(a, stats); }) {
      return {support::compare_selection(a, stats)};
    } else {
      return check_producer(a, call_.trace(), exec_, stats);
    }
  }

  /// 1 and 4, on logits that the backend has written. `a` names keys and rows.
  template <class Args, class Logits>
  std::vector<Report> compare_scored(const Args& a, const Logits& logits, const Piece& piece) {
    const support::Truth truth = support::truth_of(a.q, a.keys, a.rows);
    std::vector<Report> found{support::compare_scores(logits, truth, arithmetic_of(a), nature_.calc_limit())};
    if (backend_ == "ref") found.push_back(compare_formulations(truth));
    if (const auto exact = unquantised(piece)) {
      found.push_back(support::compare_unquantised(truth, *exact, a.rows, format_of(a), nature_.random_normal));
    }
    return found;
  }

  template <class Args>
  std::vector<Report> compare_search(const Args& a, const Piece& piece, const uint64_t* stats) {
    const support::Truth truth = support::truth_of(a.q, a.keys, a.rows);
    const support::Array logits(DType::f32, {std::max<int64_t>(a.rows.count, 1), std::max<int64_t>(truth.width, 1)});
    std::conditional_t<std::is_same_v<Args, MqaTopk>, MqaLogits, PagedMqaLogits> scored{};
    scored.q = a.q, scored.keys = a.keys, scored.rows = a.rows, scored.clean = true, scored.logits = logits.view();
    support::run_args(scored, exec_);
    std::vector<Report> found = compare_scored(a, scored, piece);
    if (!sharded(a))
      found.push_back(support::compare_sets(a, truth, arithmetic_of(a), nature_.random_normal || nature_.real));
    found.push_back(support::compare_selection(a, logits.view(), stats));
    return found;
  }

  template <class Args>
  static bool sharded(const Args& a) {
    if constexpr (requires { a.keys.shard; }) return a.keys.shard.active();
    return false;
  }
  template <class Args>
  static KeyFormat format_of(const Args& a) {
    if constexpr (requires { a.keys.cache; }) {
      return a.keys.cache.format;
    } else {
      return a.keys.format;
    }
  }
  template <class Args>
  std::string arithmetic_of(const Args& a) const {
    const char* name = arithmetic(backend_.c_str(), format_of(a), a.q.values.dtype);
    return name == nullptr ? "ref" : name;
  }

  /// The piece's rows of the trace's truth, where it has one that fits the call.
  std::optional<support::Unquantised> unquantised(const Piece& piece) {
    const Trace& trace = call_.trace();
    if (!study_obstacle(call_, windows_of(call_.args())).empty()) return std::nullopt;
    support::Unquantised exact{
        support::view(*trace.find("q_bf16"), "q_bf16"), support::view(*trace.find("keys_bf16"), "keys_bf16"), {}};
    if (const TraceTensor* raw = trace.find("weights_raw")) {
      exact.weights = support::view(*raw, "weights_raw");
    } else {
      const int64_t rows = exact.q.shape[0], heads = exact.q.shape[1];
      weights_ = support::Array(DType::f32, {rows, heads});
      const auto one =
          static_cast<float>(1 / std::sqrt(static_cast<double>(exact.q.shape[2]) * static_cast<double>(heads)));
      std::fill_n(weights_.as<float>(), weights_.size(), one);
      exact.weights = weights_.view();
    }
    for (Tensor* t : {&exact.q, &exact.weights}) cut_tensor(*t, piece.first, piece.count);
    return exact;
  }

  /// Pieces have the same list of reports, in the same order.
  static void merge(std::vector<Report> found, int64_t first_row, std::vector<Report>& reports) {
    if (reports.empty()) reports.resize(found.size());
    for (size_t i = 0; i < found.size() && i < reports.size(); ++i) {
      Report &sum = reports[i], &piece = found[i];
      sum.name = piece.name;
      sum.rows += piece.rows, sum.compared += piece.compared, sum.differing += piece.differing;
      sum.worst = std::max(sum.worst, piece.worst), sum.calc_diff = std::max(sum.calc_diff, piece.calc_diff);
      if (piece.ok) continue;
      if (sum.ok) sum.got = piece.got, sum.want = piece.want, sum.bound = piece.bound;
      sum.fail(piece.first, piece.row < 0 ? -1 : piece.row + first_row, piece.position);
    }
  }

  const support::Call& call_;
  const Nature nature_;
  const std::string backend_;
  Exec exec_;
  support::Array weights_;
};

/// Work of the oracle on one row: multiply-adds in two formulations, one of them in long double.
double work_of_row(const support::CallArgs& args) {
  return std::visit(
      [](const auto& a) -> double {
        if constexpr (requires {
                        a.q.values;
                        a.keys.block_table;
                      }) {
          return static_cast<double>(a.q.values.shape[1]) * a.keys.cache.head_dim *
                 static_cast<double>(a.keys.block_table.shape[1]) * a.keys.cache.page_size;
        } else if constexpr (requires { a.q.values; }) {
          return static_cast<double>(a.q.values.shape[1]) * static_cast<double>(a.q.values.shape[2]) *
                 static_cast<double>(a.keys.values.shape[0]);
        } else {
          return 0;
        }
      },
      args);
}

/// The call in pieces of rows that a minute or so is enough for.
std::vector<Piece> pieces_of(const support::Call& call, int64_t limit) {
  constexpr double kWork = 2e10, kPiece = 5e8;
  const int64_t rows = rows_to_cut(call.args()), step = row_step(call.args());
  const double work = std::max(1.0, work_of_row(call.args()));
  if (rows == 0 || rows % step != 0 || (limit == 0 && static_cast<double>(rows) * work <= kPiece))
    return {{call.args(), 0, rows}};
  const auto affordable = static_cast<int64_t>(std::max(1.0, kWork / work));
  const int64_t wanted = std::max(step, std::min(rows, limit > 0 ? limit : affordable) / step * step);
  const int64_t size = std::clamp(static_cast<int64_t>(kPiece / work) / step * step, step, wanted);
  const int64_t count = (wanted + size - 1) / size;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) {  // evenly spaced, the last one ending with the last row
    const int64_t first = count == 1 ? rows - size : (rows - size) / step * i / (count - 1) * step;
    pieces.push_back({cut_rows(call.args(), first, size), first, size});
  }
  return pieces;
}

/// Outputs of the whole call on `ref` against the trace's own expectation.
std::vector<Report> compare_expected(const support::Call& call, const Exec& exec) {
  std::vector<Report> found;
  Snapshot got, want;
  for (const auto& [name, tensor] : call.outputs()) {
    const std::string plain = name.rfind("out.", 0) == 0 ? name.substr(4) : name;
    if (const TraceTensor* expected = call.trace().find("expected_" + plain)) {
      got.emplace_back(plain, TraceTensor{}), want.emplace_back(plain, *expected);
    }
  }
  if (got.empty()) return found;
  run_with_progress(call.args(), exec, "expected results");
  for (auto& [name, tensor] : got) tensor = *call.output(name);
  found.push_back(compare_bits("expected results", got, want));
  return found;
}

}  // namespace

std::vector<Finding> check_trace(const std::shared_ptr<const Trace>& trace, const std::vector<std::string>& backends,
                                 int64_t rows) {
  support::CallOptions options;
  if (trace->text("op", "").find("topk") != std::string::npos) {
    options.set["out"] = trace->text("out", "indices") + ",indices,scores,counts";
  }
  const support::Call call(trace, options);
  std::vector<Finding> findings;
  for (const std::string& backend : backends) {
    const Exec exec = exec_on(backend);
    // Throws on wrong arguments; before any cut, which would hide a tensor that is too short.
    if (const std::string reason = why_not(call.args(), exec); !reason.empty()) {
      findings.push_back({backend, {}, reason});
      continue;
    }
    const std::vector<Piece> pieces = pieces_of(call, rows);
    Progress bar("checking on " + backend, static_cast<int64_t>(pieces.size()));
    std::vector<Report> reports;
    Checker checker(call, backend);
    for (size_t i = 0; i < pieces.size(); ++i) {
      checker.run(pieces[i], reports);
      bar.at(static_cast<int64_t>(i) + 1);
    }
    if (backend == "ref") {
      for (Report& report : compare_expected(call, exec)) reports.push_back(std::move(report));
    }
    for (Report& report : reports) findings.push_back({backend, std::move(report), ""});
  }
  return findings;
}

}  // namespace topkey::cli
