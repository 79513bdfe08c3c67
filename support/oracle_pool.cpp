// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See oracle_pool.h.
#include "support/oracle_pool.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>

namespace topkey::support {
namespace {

constexpr double kBf16Step = 0x1p-7;  // of a number, at most

/// What one token gives to a channel.
struct Part {
  std::vector<double> value, score;
};

std::vector<double> softmax_of(const std::vector<Part>& parts, size_t dim) {
  std::vector<double> x(dim);
  for (size_t d = 0; d < dim; ++d) {
    double most = -INFINITY, total = 0;
    for (const Part& p : parts) most = std::fmax(most, p.score[d]);
    for (const Part& p : parts) total += std::exp(p.score[d] - most);
    for (const Part& p : parts) x[d] += p.value[d] * (std::exp(p.score[d] - most) / total);
  }
  return x;
}

/// Row and column i, j of the Hadamard matrix have the sign of the common bits' parity.
JoinedKey rotated(std::vector<double> x) {
  const size_t dim = x.size();
  JoinedKey key{std::move(x), std::vector<double>(dim), std::vector<double>(dim)};
  double loose = 0;
  for (const double v : key.joined) loose += std::abs(v) * 1.5 * kBf16Step / std::sqrt(static_cast<double>(dim));
  for (size_t i = 0; i < dim; ++i) {
    double y = 0;
    for (size_t j = 0; j < dim; ++j) y += std::popcount(i & j) % 2 == 0 ? key.joined[j] : -key.joined[j];
    key.value[i] = y / std::sqrt(static_cast<double>(dim));
    key.slack[i] = loose + (std::abs(key.value[i]) + loose) * kBf16Step;
  }
  return key;
}

/// Request of each row, and each row's position where it is no padding (else -1).
struct TokenOf {
  std::function<int64_t(int64_t)> request;
  const Tensor& positions;
  int64_t position(int64_t row) const {
    const int64_t position = int_at(positions, row);
    return request(row) < 0 || position > int64_t{1} << 48 ? -1 : std::max<int64_t>(-1, position);
  }
};

int64_t request_by(const Tensor& starts, int64_t row) {
  for (int64_t b = 0; b + 1 < starts.shape[0]; ++b) {
    if (int_at(starts, b) <= row && row < int_at(starts, b + 1)) return b;
  }
  return -1;
}

/// What both operations have in common: rows in order, tokens seen so far in this request, a state that goes along.
struct Player {
  const Tensor& slot_mapping;
  const Tensor& state_slots;
  const KeyCache& cache;
  TokenOf tokens;
  int64_t entries;                                                         ///< of the state
  int64_t period;                                                          ///< tokens a key row
  int64_t window;                                                          ///< tokens that make one
  std::function<Part(int64_t row)> part;                                   ///< of a row of the call
  std::function<std::optional<Part>(int64_t row, int64_t position)> kept;  ///< of the state
  std::function<void(int64_t row, int64_t entry)> leave;
  std::function<std::optional<JoinedKey>(int64_t row, const std::vector<Part>& parts)> finish;

  std::optional<std::vector<Part>> collect(int64_t row, const std::map<int64_t, Part>& seen) const {
    const int64_t last = tokens.position(row);
    if (last < 0 || (last + 1) % period != 0) return {};
    std::vector<Part> parts;
    for (int64_t p = std::max<int64_t>(0, last + 1 - window); p <= last; ++p) {
      const auto found = seen.find(p);
      const std::optional<Part> part_of = found != seen.end() ? found->second : kept(row, p);
      if (!part_of) return {};
      parts.push_back(*part_of);
    }
    return parts;
  }
  void play(Replay& replay, bool needs_state) const {
    std::map<int64_t, Part> seen;
    const int64_t slots = cache.pages.shape[0] * cache.page_size;
    for (int64_t r = 0; r < slot_mapping.shape[0]; ++r) {
      if (r == 0 || tokens.request(r) != tokens.request(r - 1)) seen.clear();
      const int64_t slot = int_at(slot_mapping, r), position = tokens.position(r);
      const int64_t entry = state_slots.data == nullptr || position < 0 ? -1 : int_at(state_slots, r);
      if (position >= 0) seen[position] = part(r);
      if (slot >= 0 && (!needs_state || int_at(state_slots, r) >= 0)) {
        std::optional<std::vector<Part>> parts;
        if (slot < slots && (!needs_state || entry < entries)) parts = collect(r, seen);
        if (parts) {
          replay.keys[slot] = *finish(r, *parts);
        } else {
          ++replay.skipped;
        }
      }
      if (entry >= entries) ++replay.skipped;
      if (entry >= 0 && entry < entries) leave(r, entry);
    }
  }
};

Part part_of(const float* value, const float* score, int64_t dim) {
  return {std::vector<double>(value, value + dim), std::vector<double>(score, score + dim)};
}

}  // namespace

Replay replay(const PoolK& a, const Array& before) {
  Replay result;
  if (before) result.state = before.clone();
  const int64_t dim = a.cache.head_dim, ring = before ? before.view().shape[2] : 1;
  const auto tail_at = [&](int64_t entry, int64_t half) {
    return result.state.as<uint16_t>() + ((entry / ring * 2 + half) * ring + entry % ring) * dim;
  };
  const auto make = [&](const std::function<float(int64_t)>& k, const std::function<float(int64_t)>& gate,
                        int64_t position) {
    std::vector<float> value, score;
    for (int64_t d = 0; d < dim; ++d) {
      value.push_back(k(d));
      score.push_back(gate(d) + float_at(a.ape, position % a.pool_size, d));
    }
    return part_of(value.data(), score.data(), dim);
  };
  const TokenOf tokens{[&](int64_t r) {
                         if (a.request.data != nullptr) return int_at(a.request, r);
                         if (a.q_indptr.data != nullptr) return request_by(a.q_indptr, r);
                         return r / std::max(1, a.next_n);
                       },
                       a.positions};
  Player player{a.slot_mapping,
                a.tail_slots,
                a.cache,
                tokens,
                before ? before.view().shape[0] * ring : 0,
                a.pool_size,
                a.pool_size,
                {},
                {},
                {},
                {}};
  player.part = [&](int64_t r) {
    return make([&](int64_t d) { return float_at(a.k, r, d); }, [&](int64_t d) { return float_at(a.gate, r, d); },
                tokens.position(r));
  };
  player.kept = [&](int64_t r, int64_t position) -> std::optional<Part> {
    const int64_t own = a.tail_slots.data == nullptr ? -1 : int_at(a.tail_slots, r);
    if (own < 0 || own >= player.entries) return {};
    const int64_t entry = own / ring * ring + position % ring;
    return make([&](int64_t d) { return bf16_to_float(tail_at(entry, 0)[d]); },
                [&](int64_t d) { return bf16_to_float(tail_at(entry, 1)[d]); }, position);
  };
  player.leave = [&](int64_t r, int64_t entry) {
    std::memcpy(tail_at(entry, 0), element(a.k, r), static_cast<size_t>(2 * dim));
    std::memcpy(tail_at(entry, 1), element(a.gate, r), static_cast<size_t>(2 * dim));
  };
  player.finish = [&](int64_t, const std::vector<Part>& parts) {
    return std::optional(rotated(softmax_of(parts, static_cast<size_t>(dim))));
  };
  player.play(result, false);
  return result;
}

namespace {

/// RMS norm, then pairs (2i, 2i + 1) of the trailing dims turned. sizes: of x if all its terms had one sign; where they
/// cancel, the norm makes their rounding large.
JoinedKey normed(const CompressK& a, std::vector<double> x, const std::vector<double>& sizes, int64_t position) {
  const int64_t dim = a.cache.head_dim, turned = a.cos_sin.data == nullptr ? 0 : a.cos_sin.shape[1];
  JoinedKey key{x, {}, {}};
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(dim) + static_cast<double>(a.eps));
  double largest = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const float weight = a.rms_weight.data == nullptr ? 1.0F : float_at(a.rms_weight, d);
    largest = std::fmax(largest, sizes[static_cast<size_t>(d)] * scale * std::abs(static_cast<double>(weight)));
    key.value.push_back(x[static_cast<size_t>(d)] * scale * static_cast<double>(weight));
  }
  for (int64_t i = 0; i < turned / 2; ++i) {
    if (position >= a.cos_sin.shape[0]) {
      std::fill(key.value.begin(), key.value.end(), NAN);
      break;
    }
    double &first = key.value[static_cast<size_t>(dim - turned + 2 * i)],
           &second = key.value[static_cast<size_t>(dim - turned + 2 * i + 1)];
    const double angle_cos = static_cast<double>(float_at(a.cos_sin, position, i)),
                 angle_sin = static_cast<double>(float_at(a.cos_sin, position, turned / 2 + i));
    const double f = first, s = second;
    first = f * angle_cos - s * angle_sin;
    second = s * angle_cos + f * angle_sin;
  }
  for (const double v : key.value) key.slack.push_back(1.5 * kBf16Step * std::abs(v) + 1e-5 * largest);
  return key;
}

}  // namespace

Replay replay(const CompressK& a, const Array& before) {
  Replay result;
  result.state = before.clone();
  const int64_t dim = a.cache.head_dim, width = a.kv.shape[1], ratio = a.ape.shape[0], block = before.view().shape[1];
  const int64_t windows = width / dim;
  const auto state_at = [&](int64_t entry) { return result.state.as<float>() + entry * 2 * width; };
  const TokenOf tokens{[&](int64_t r) { return request_by(a.query_start, r); }, a.positions};
  const auto state_row = [&](int64_t r) {
    std::vector<float> row(static_cast<size_t>(2 * width));
    for (int64_t i = 0; i < width; ++i) {
      row[static_cast<size_t>(i)] = float_at(a.kv, r, i);
      row[static_cast<size_t>(width + i)] = float_at(a.score, r, i) + float_at(a.ape, tokens.position(r) % ratio, i);
    }
    return row;
  };
  Player player{a.slot_mapping,
                a.state_slots,
                a.cache,
                tokens,
                before.view().shape[0] * block,
                ratio,
                windows * ratio,
                {},
                {},
                {},
                {}};
  player.part = [&](int64_t r) {
    const std::vector<float> row = state_row(r);
    return part_of(row.data(), row.data() + width, width);
  };
  player.kept = [&](int64_t r, int64_t position) -> std::optional<Part> {
    int64_t entry = int_at(a.state_slots, r) / block * block + position % block;
    if (a.state_table.data != nullptr) {
      const int64_t b = tokens.request(r), column = position / block;
      if (b >= a.state_table.shape[0] || column >= a.state_table.shape[1]) return {};
      const int64_t page = int_at(a.state_table, b, column);
      if (page < 0 || page >= before.view().shape[0]) return {};
      entry = page * block + position % block;
    }
    return part_of(state_at(entry), state_at(entry) + width, width);
  };
  player.leave = [&](int64_t r, int64_t entry) {
    const std::vector<float> row = state_row(r);
    std::copy(row.begin(), row.end(), state_at(entry));
  };
  player.finish = [&](int64_t r, const std::vector<Part>& parts) {
    // The last `ratio` tokens are the younger half; with one window there is no other.
    std::vector<Part> halves;
    const auto count = static_cast<int64_t>(parts.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = windows == 2 && i >= count - ratio ? dim : 0;
      const Part& p = parts[static_cast<size_t>(i)];
      halves.push_back({std::vector<double>(p.value.begin() + first, p.value.begin() + first + dim),
                        std::vector<double>(p.score.begin() + first, p.score.begin() + first + dim)});
    }
    const int64_t start = tokens.position(r) / ratio * ratio;
    if (a.cos_sin.data != nullptr && start >= a.cos_sin.shape[0]) ++result.positions;
    std::vector<Part> sizes = halves;
    for (Part& part : sizes) {
      for (double& v : part.value) v = std::abs(v);
    }
    const auto size = static_cast<size_t>(dim);
    return std::optional(normed(a, softmax_of(halves, size), softmax_of(sizes, size), start));
  };
  player.play(result, true);
  return result;
}

}  // namespace topkey::support
