// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// What the ranks of a layer must agree on: what they are, and what a step stores and exchanges.
#include "indexer.h"
#include "shard/layer.h"
#include "topkey/backend.h"
#include "topkey/version.h"

namespace topkey::shard {
namespace {

/// "name=value" lines.
class Lines {
 public:
  void add(const char* name, const std::string& value) { text_ += std::string(name) + "=" + value + "\n"; }
  void number(const char* name, int64_t value) { add(name, std::to_string(value)); }
  void given(const char* name, const Tensor& t) { add(name, there(t) ? "given" : "absent"); }
  std::string text() const { return text_; }

 private:
  std::string text_;
};

/// The backend that will search: the first of exec's device that can.
const BackendInfo* searcher(const std::vector<BackendInfo>& all, const PagedMqaTopk& search, const Exec& exec) {
  for (const BackendInfo& b : all) {
    Exec forced = exec;
    forced.backend = b.name.c_str();
    if (exec.backend != nullptr && b.name != exec.backend) continue;
    if (b.device != exec.device || !b.unusable.empty()) continue;
    if (paged_mqa_topk_unsupported(search, forced) == nullptr) return &b;
  }
  return nullptr;
}

std::string agreement(const Step& s, const Exec& exec) {
  Lines lines;
  const IndexerConfig& c = s.config;
  lines.add("version", version());
  lines.add("layer", s.pools ? "k-pools" : "keys");
  lines.number("context.world_size", s.spec.context.active() ? s.spec.context.world_size : 1);
  lines.number("context.interleave", s.spec.context.active() ? s.spec.context.run() : 1);
  lines.number("row_shards", std::max(s.spec.row_shards, 1));
  lines.number("prefill_size", std::max(s.spec.prefill_size, 1));
  lines.number("shard_decode", s.spec.shard_decode);
  lines.number("exchange_limit", static_cast<int64_t>(limit_of(s.spec)));
  lines.add("format", format_name(c.format));
  lines.number("heads", c.heads);
  lines.number("head_dim", c.head_dim);
  lines.number("topk", c.topk);
  lines.number("ratio", std::max(c.ratio, 1));
  lines.number("pool_size", layer::pool_size_of(c));
  lines.number("scale", static_cast<int64_t>(c.scale));
  lines.number("role", static_cast<int64_t>(c.role));
  lines.number("candidate_block_size", c.candidate_block_size);
  lines.number("candidate_topk_blocks", c.candidate_topk_blocks);
  lines.number("candidate_ratio", c.candidate_ratio);
  lines.number("force_first", c.force_first);
  lines.number("force_last", c.force_last);
  const std::vector<BackendInfo> all = backends();
  const BackendInfo* b = searcher(all, search_rows(search_args(s), {0, s.step.rows.count}), exec);
  if (b == nullptr) return lines.text();  // the search will say why
  const char* name = arithmetic(b->name.c_str(), c.format, s.step.q.values.dtype);
  const std::string numerics = numerics_version(b->name.c_str(), c.format);
  lines.add("arithmetic", name);
  lines.add("numerics", numerics.substr(numerics.rfind('/') + 1));
  // Tensor cores of another generation may add in another order: there the devices must be of one kind.
  if (b->device == Device::cuda) lines.add("compute capability", b->detail);
  return lines.text();
}

uint64_t agreement_hash(const Step& s, const Exec& exec) {
  uint64_t h = hash_of(&s.config, sizeof s.config);
  h = hash_of(&s.spec, sizeof s.spec, h);
  h = hash_of(&s.pools, sizeof s.pools, h);
  h = hash_of(&s.step.q.values.dtype, sizeof(DType), h);
  h = hash_of(&exec.device, sizeof exec.device, h);
  h = hash_of(&exec.device_id, sizeof exec.device_id, h);
  for (const char* name : {exec.backend, exec.arithmetic, exec.strategy}) {
    h = hash_of(name == nullptr ? "" : name, name == nullptr ? 1 : std::strlen(name), h);
  }
  return h;
}

/// The first of them, and a hash of all.
std::string sizes_text(const int64_t* sizes, int32_t ranks) {
  constexpr int32_t kShown = 16;
  std::string text;
  for (int32_t r = 0; r < std::min(ranks, kShown); ++r) text += (r > 0 ? " " : "") + std::to_string(sizes[r]);
  if (ranks <= kShown) return text;
  return text + " ... (hash " + std::to_string(hash_of(sizes, sizeof *sizes * static_cast<size_t>(ranks))) + ")";
}

void add_rows(Lines& lines, const Step& s) {
  lines.number("rows.count", s.step.rows.count);
  lines.add("row_shard_sizes", sizes_text(s.in.row_shard_sizes, s.spec.row_shards));
  // Of pools what is exchanged are their ids, whatever is asked for.
  if (s.pools) return;
  lines.given("out.indices", s.step.out.indices);
  lines.given("out.slots", s.step.out.slots);
  lines.given("out.scores", s.step.out.scores);
  lines.given("out.counts", s.step.out.counts);
}

void add_context(Lines& lines, const Step& s) {
  const bool prefill = s.spec.prefill_size > 1;
  lines.number(prefill ? "num_decode_rows" : "rows.count", prefill ? common_rows(s) : s.step.rows.count);
  // More than topk is as good as topk.
  lines.number("rows.max_len (up to topk)", entries_of(s.config, s.step.rows.max_len).winners);
  if (!prefill) lines.number("rows of a request (0: as told)", there(s.step.rows.request) ? 0 : next_n_of(s.step.rows));
  if (!prefill) return;
  lines.number("total_keys", s.in.total_keys);
  lines.number("requests of key_indptr", s.in.key_indptr.shape[0] - 1);
}

/// What every prefill rank brings.
void add_new_keys(Lines& lines, const Step& s) {
  if (!stores(s)) return;
  const int64_t own = common_rows(s), slots = s.step.slot_mapping.shape[0];
  lines.number("new keys of a rank",
               s.pools ? s.step.k.shape[0] - own : (slots - own) / std::max(s.spec.prefill_size, 1));
  for (const auto& [name, t] : {std::pair{"bytes of a row of k", &s.step.k}, {"of k_scales", &s.step.k_scales}}) {
    lines.number(name, there(*t) ? row_size(*t, row_elements(*t)) : 0);
  }
}

std::string step_lines(const Step& s, const topkey_communicator& comm) {
  Lines lines;
  lines.given("k", s.step.k);
  if (s.pools) {
    lines.given("gate", s.step.gate);
    lines.given("ape", s.step.ape);
    lines.given("positions", s.step.positions);
  }
  if (&comm == s.in.prefill_comm && s.spec.prefill_size > 1) add_new_keys(lines, s);
  if (&comm != s.in.comm) return lines.text();
  if (s.spec.row_shards > 1) add_rows(lines, s);
  if (s.spec.context.active()) add_context(lines, s);
  return lines.text();
}

}  // namespace

Question question_of(const Step& s, const topkey_communicator& comm, const Exec& exec) {
  return {agreement_hash(s, exec), [&] { return agreement(s, exec); }, [&] { return step_lines(s, comm); }};
}

}  // namespace topkey::shard
