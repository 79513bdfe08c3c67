// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// See on_device.h. Small blocks travel together through one staging buffer; large ones, which may be mostly holes, by the
// rows of their tensors. Device memory is kept for the next call. no_on_device.cpp is the twin without CUDA.
#include "support/on_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "support/array.h"

namespace topkey::support {
namespace {

constexpr size_t kWall = 1024;
constexpr size_t kLarge = size_t{64} << 20;
constexpr uint8_t kPoison = 0xA5;

void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

/// Device memory of the process: of each device as many pieces as calls ran there at once, each as large as it ever was.
class Arena {
 public:
  uint8_t* take(size_t bytes) {
    int device = 0;
    must(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard<std::mutex> lock(mutex_);
    auto piece = std::find_if(pieces_.begin(), pieces_.end(),
                              [device](const Piece& p) { return !p.taken && p.device == device; });
    if (piece == pieces_.end()) piece = pieces_.insert(piece, Piece{});
    if (bytes > piece->size) {
      if (piece->data != nullptr) must(cudaFree(piece->data), "cudaFree");
      *piece = {};
      piece->device = device;
      const size_t size = std::max(bytes, pieces_.size() == 1 ? size_t{256} << 20 : size_t{16} << 20);
      must(cudaMalloc(reinterpret_cast<void**>(&piece->data), size), "cudaMalloc");
      piece->size = size;
    }
    piece->taken = true;
    return piece->data;
  }
  void give_back(const uint8_t* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Piece& p : pieces_) p.taken = p.taken && p.data != data;
  }
  std::atomic<uint64_t> calls{0};

 private:
  struct Piece {
    uint8_t* data = nullptr;
    size_t size = 0;
    int device = 0;
    bool taken = false;
  };
  std::mutex mutex_;
  std::vector<Piece> pieces_;
};
Arena& arena() {
  static Arena one;
  return one;
}

/// First byte and the one past the last; none where an extent is 0.
bool bytes_of(const Tensor& t, uint8_t** first, uint8_t** last) {
  int64_t low = 0, high = 0;
  for (int32_t d = 0; d < t.ndim; ++d) {
    if (t.shape[d] <= 0) return false;
    const int64_t reach = (t.shape[d] - 1) * t.stride[d];
    (reach < 0 ? low : high) += reach;
  }
  const auto width = static_cast<int64_t>(dtype_bytes(t.dtype));
  auto* data = static_cast<uint8_t*>(t.data);
  *first = data + low * width, *last = data + (high + 1) * width;
  return true;
}

}  // namespace

DeviceCopy::~DeviceCopy() {
  if (device_ == nullptr) return;
  cudaDeviceSynchronize();  // a call that threw may have left work behind
  arena().give_back(device_);
}

void DeviceCopy::add(Tensor& tensor, Role role) {
  for (Part& known : parts_) {
    if (known.pointer != &tensor.data) continue;  // written and read: an output
    if (role == Role::output) known.role = role;
    return;
  }
  Part part{&tensor.data, &tensor, nullptr, nullptr, role};
  if (tensor.data != nullptr && bytes_of(tensor, &part.first, &part.last)) parts_.push_back(part);
}

void DeviceCopy::add(void** pointer, size_t bytes, Role role) {
  auto* first = static_cast<uint8_t*>(*pointer);
  if (first != nullptr && bytes > 0) parts_.push_back({pointer, nullptr, first, first + bytes, role});
}

/// Parts that share memory share a block.
void DeviceCopy::make_blocks() {
  std::vector<size_t> order(parts_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return parts_[a].first < parts_[b].first; });
  for (const size_t i : order) {
    const Part& p = parts_[i];
    if (blocks_.empty() || p.first >= blocks_.back().last)
      blocks_.push_back({p.first, p.last, 0, false, true, false, {}});
    Block& b = blocks_.back();
    b.last = std::max(b.last, p.last);
    b.output = b.output || p.role == Role::output;
    b.scratch = b.scratch && p.role == Role::scratch;
    b.parts.push_back(i);
  }
  // Addresses keep their place within 256 bytes; small blocks come first.
  for (const bool large : {false, true}) {
    for (Block& b : blocks_) {
      b.large = static_cast<size_t>(b.last - b.first) > kLarge || b.scratch;
      if (b.large != large) continue;
      const size_t place = reinterpret_cast<uintptr_t>(b.first) % 256;
      b.at = (used_ + kWall + 255) / 256 * 256 + place;
      used_ = b.at + static_cast<size_t>(b.last - b.first) + kWall;
    }
    if (!large) staging_.assign(used_, kPoison);
  }
}

void DeviceCopy::copy_rows(const Block& block, bool to_device) const {
  uint8_t* device = device_ + block.at;
  for (const size_t i : block.parts) {
    const Part& p = parts_[i];
    if (p.role == Role::scratch || (!to_device && p.role != Role::output)) continue;
    const auto copy = [&](uint8_t* first, size_t bytes) {
      uint8_t* there = device + (first - block.first);
      must(to_device ? cudaMemcpy(there, first, bytes, cudaMemcpyHostToDevice)
                     : cudaMemcpy(first, there, bytes, cudaMemcpyDeviceToHost),
           "cudaMemcpy");
    };
    const auto whole = static_cast<size_t>(p.last - p.first);
    if (p.view == nullptr || p.view->ndim < 2 || whole < kLarge) {
      copy(p.first, whole);
      continue;
    }
    Tensor row = *p.view;  // its data is the device's by now: only extents are used
    const int64_t width = static_cast<int64_t>(dtype_bytes(row.dtype));
    for (int64_t r = 0; r < p.view->shape[0]; ++r) {
      int64_t reach = 0;
      for (int32_t d = 1; d < row.ndim; ++d) reach += (row.shape[d] - 1) * row.stride[d];
      copy(p.first + r * row.stride[0] * width, static_cast<size_t>((reach + 1) * width));
    }
  }
}

void DeviceCopy::upload() {
  make_blocks();
  uint8_t* base = device_ = arena().take(used_);
  for (const Block& b : blocks_) {
    if (!b.large) std::memcpy(staging_.data() + b.at, b.first, static_cast<size_t>(b.last - b.first));
  }
  if (used_ > staging_.size()) must(cudaMemset(base + staging_.size(), kPoison, used_ - staging_.size()), "cudaMemset");
  if (!staging_.empty()) must(cudaMemcpy(base, staging_.data(), staging_.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  for (const Block& b : blocks_) {
    if (b.large) copy_rows(b, true);
    for (const size_t i : b.parts) {
      auto* host = static_cast<uint8_t*>(*parts_[i].pointer);
      *parts_[i].pointer = base + b.at + (host - b.first);
    }
  }
  must(cudaDeviceSynchronize(), "the copies");  // streams of the call's own do not wait for this one
}

void DeviceCopy::download() {
  must(cudaDeviceSynchronize(), "the call");
  ++arena().calls;
  const std::vector<uint8_t> sent = staging_;
  if (!staging_.empty())
    must(cudaMemcpy(staging_.data(), device_, staging_.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  size_t end = 0;
  for (const Block& b : blocks_) {
    const auto bytes = static_cast<size_t>(b.last - b.first);
    if (b.large) {
      std::vector<uint8_t> walls(2 * kWall);
      must(cudaMemcpy(walls.data(), device_ + b.at - kWall, kWall, cudaMemcpyDeviceToHost), "cudaMemcpy");
      must(cudaMemcpy(walls.data() + kWall, device_ + b.at + bytes, kWall, cudaMemcpyDeviceToHost), "cudaMemcpy");
      if (std::any_of(walls.begin(), walls.end(), [](uint8_t x) { return x != kPoison; }))
        throw std::logic_error("the call wrote outside a buffer on the device");
      copy_rows(b, false);
      continue;
    }
    end = std::max(end, b.at + bytes);
    if (b.output) {
      std::memcpy(b.first, staging_.data() + b.at, bytes);
      std::fill_n(staging_.begin() + static_cast<ptrdiff_t>(b.at), bytes, kPoison);  // what is left must be as sent
    }
  }
  for (size_t i = 0; i < staging_.size(); ++i) {
    bool inside = false;
    if (staging_[i] == sent[i]) continue;
    for (const Block& b : blocks_) {
      inside = inside || (b.output && !b.large && i >= b.at && i < b.at + static_cast<size_t>(b.last - b.first));
    }
    if (!inside) throw std::logic_error("the call wrote to an input or outside a buffer on the device");
  }
}

uint64_t calls_on_device() { return arena().calls; }

namespace {

using Role = DeviceCopy::Role;

/// Everything of a layer's step.
void add_step(DeviceCopy& copy, IndexerStep& step, Exec& exec) {
  EachTensor each{[&](Tensor& t) { copy.add(t, Role::input); }};
  for (Tensor* t : {&step.k, &step.k_scales, &step.slot_mapping, &step.gate, &step.ape, &step.positions})
    copy.add(*t, Role::input);
  copy.add(step.tail_slots, Role::input);
  copy.add(step.tail, Role::output);
  fields(each, step.norm), fields(each, step.rope), fields(each, step.q), fields(each, step.keys);
  fields(each, step.rows), fields(each, step.out);
  copy.add(step.keys.cache.pages, Role::output);
  copy.add(step.candidates, Role::output);
  EachTensor outputs{[&](Tensor& t) { copy.add(t, Role::output); }};
  output_fields(outputs, step.out);
  copy.add(reinterpret_cast<void**>(&exec.stats), exec.stats != nullptr ? kNumStats * sizeof(uint64_t) : 0,
           Role::output);
  copy.add(&exec.workspace, exec.workspace_bytes, Role::scratch);
}

struct OwnStream {
  OwnStream() { must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(stream); }
  cudaStream_t stream{};
};

template <class Layer>
void forward_layer(const Layer& layer, IndexerStep step, Exec exec) {
  if (exec.device == Device::cpu) return layer.forward(step, exec);
  DeviceCopy copy;
  add_step(copy, step, exec);
  copy.upload();
  layer.forward(step, exec);
  copy.download();
}

template <class Layer>
void forward_rank(const Layer& layer, IndexerStep step, RankCall rank, Exec exec) {
  if (exec.device == Device::cpu) return forward_sharded(layer, step, rank.spec, rank.shard, exec);
  const OwnStream own;
  if (exec.stream == nullptr) exec.stream = own.stream;
  DeviceCopy copy;
  add_step(copy, step, exec);
  ShardStep& s = rank.shard;
  for (Tensor* t : {&s.whole_start, &s.whole_end, &s.key_indptr, &s.gathered_start, &s.token_order, &s.token_positions,
                    &s.token_request})
    copy.add(*t, Role::input);
  for (Tensor* t : {&s.gathered.values, &s.gathered.scales}) copy.add(*t, Role::output);
  copy.upload();
  forward_sharded(layer, step, rank.spec, s, exec);
  copy.download();
}

}  // namespace

void forward_on_device(const SparseAttnIndexer& indexer, const IndexerStep& step, const Exec& exec) {
  forward_layer(indexer, step, exec);
}
void forward_on_device(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const Exec& exec) {
  forward_layer(indexer, step, exec);
}
void forward_on_device(const SparseAttnIndexer& indexer, const IndexerStep& step, const RankCall& rank,
                       const Exec& exec) {
  forward_rank(indexer, step, rank, exec);
}
void forward_on_device(const SparseAttnIndexerKpool& indexer, const IndexerStep& step, const RankCall& rank,
                       const Exec& exec) {
  forward_rank(indexer, step, rank, exec);
}

}  // namespace topkey::support
