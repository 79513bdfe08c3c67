// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Ranks on one GPU, threads of this process with a stream each: the collectives on device memory, strided and not; that a
// transport that blocks refuses a captured stream and leaves the capture valid, where one that does not is captured; one
// that takes device memory gets it. And both layers of one rank as replayed graphs. (Sharded steps against one rank are in
// shard_layer_test, shard_pools_test and shard_serving_test, which run on a GPU too.)
#include <memory>

#include "tests/cluster.h"
#include "tests/gpu/on_gpu.h"

namespace topkey::testing {
namespace {

Exec exec_of(const std::string& backend, const Stream& stream) {
  Exec exec = on(backend);
  exec.stream = stream.stream;
  return exec;
}

/// One rank on the device: what it is given is what it has.
class OneRank final : public Communicator {
 public:
  explicit OneRank(uint32_t flags) : Communicator(0, 1, flags) {}
  void all_gather(const void* send, void* receive, size_t bytes, void* stream) override {
    cudaPointerAttributes facts{};
    const bool device = cudaPointerGetAttributes(&facts, receive) == cudaSuccess && facts.type == cudaMemoryTypeDevice;
    ++(device ? on_device : on_host);
    if (send == receive) return;
    must(cudaMemcpyAsync(receive, send, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)));
  }
  void all_gatherv(const void* send, void* receive, const size_t* bytes, void* stream) override {
    all_gather(send, receive, bytes[0], stream);
  }
  int on_device = 0, on_host = 0;
};

class ShardOnGpu : public ::testing::TestWithParam<std::string> {};

TEST_P(ShardOnGpu, RowsAreExchangedStridedAndNot) {
  for (const int64_t pad : {0, 3}) {
    for (const DType dtype : {DType::i32, DType::u8}) {
      const std::vector<int64_t> sizes{5, 0, 7};
      constexpr int64_t kFirst = 2, kRows = 15, kWidth = 9;
      const int64_t bytes = dtype == DType::i32 ? 4 : 1, row = (kWidth + pad) * bytes;
      const auto comms = local_communicators(3);
      for (const Thrown& t : run_ranks(3, [&](int32_t rank) {
             const Stream stream;
             std::vector<uint8_t> own(static_cast<size_t>(kRows * row), 0xEE), want = own;
             for (int64_t r = 0; r < 12; ++r) {
               const int32_t owner = r < 5 ? 0 : 2;
               for (int64_t c = 0; c < kWidth * bytes; ++c) {
                 const auto at = static_cast<size_t>((kFirst + r) * row + c);
                 want[at] = static_cast<uint8_t>(r * 17 + c);
                 if (owner == rank) own[at] = want[at];
               }
             }
             const GpuBytes buffer(own.size());
             buffer.put(own.data(), own.size());
             ExchangeRows e{};
             e.buffer = tensor(buffer.data(), dtype, {kRows, kWidth}, {kWidth + pad, 1});
             e.width = kWidth, e.first_row = kFirst, e.row_shard_sizes = sizes.data();
             Communicator& comm = *comms[static_cast<size_t>(rank)];
             Exec exec = exec_of(GetParam(), stream);
             const GpuBytes room(exchange_rows_workspace_bytes(e, comm, exec));
             exec.workspace = room.data(), exec.workspace_bytes = room.size();
             exchange_rows(e, comm, exec);
             stream.wait();
             EXPECT_EQ(buffer.get<uint8_t>(want.size()), want) << "rank " << rank << ", pad " << pad;
           })) {
        EXPECT_EQ(t.status, Status::ok) << t.sentence;
      }
    }
  }
}

/// Keys of every format to their global places, also where rows of the output are apart.
TEST_P(ShardOnGpu, KeysAreGathered) {
  for (const KeyFormat format : {KeyFormat::fp8, KeyFormat::mxfp4, KeyFormat::bf16, KeyFormat::q8_0, KeyFormat::f32}) {
    for (const int32_t world : {2, 4, 7}) {
      ProblemSpec spec = decode_spec();
      spec.format = format, spec.keys = 400, spec.rows = 40, spec.requests = 40;
      const Problem whole = make_problem(spec);
      std::vector<int32_t> starts{0};
      for (const int64_t n : whole.lens) starts.push_back(starts.back() + static_cast<int32_t>(n));
      const int64_t total = starts.back() + 2, width = dense_elements(format, spec.head_dim);
      const Array indptr = Array::of(starts);
      Array scales;
      if (format == KeyFormat::fp8) scales = Array(DType::f32, {total});
      if (format == KeyFormat::mxfp4) scales = Array(DType::u8, {total, spec.head_dim / 32});
      const Array values(dense_dtype(format), {total, width});
      std::memset(values.as<uint8_t>(), 0xEE, values.bytes());
      GatherK g{};
      g.keys = whole.paged_keys(), g.indptr = indptr.view(), g.total = total;
      g.out = {values.view(), scales.view(), format};
      run(g, on("cpu"));
      const auto comms = local_communicators(world);
      for (const Thrown& t : run_ranks(world, [&](int32_t rank) {
             const Stream stream;
             const Problem part = shard_of(whole, {rank, world, 16});
             const int64_t row = static_cast<int64_t>(values.bytes()) / total, apart = row + 12;
             const OnGpu pages(part.pages), table(part.block_table), bounds(indptr);
             const GpuBytes own(static_cast<size_t>(total * apart)), own_scales(scales ? scales.bytes() : size_t{1});
             GatherK a = g;
             a.keys = part.paged_keys();
             a.keys.cache.pages.data =
                 static_cast<uint8_t*>(pages.view().data) +
                 (static_cast<uint8_t*>(part.paged_keys().cache.pages.data) - part.pages.as<uint8_t>());
             a.keys.block_table.data = table.view().data;
             a.indptr = bounds.view();
             a.out.values.data = own.data();
             a.out.values.stride[0] = apart / (row / width);
             if (scales) a.out.scales.data = own_scales.data();
             Exec exec = exec_of(GetParam(), stream);
             const GpuBytes room(gather_k_sharded_workspace_bytes(a, exec));
             exec.workspace = room.data(), exec.workspace_bytes = room.size();
             gather_k_sharded(a, *comms[static_cast<size_t>(rank)], exec);
             stream.wait();
             const std::vector<uint8_t> got = own.get<uint8_t>(own.size());
             int64_t wrong = 0;
             for (int64_t i = 0; i < starts.back(); ++i) {
               wrong +=
                   std::memcmp(got.data() + i * apart, values.as<uint8_t>() + i * row, static_cast<size_t>(row)) != 0;
             }
             EXPECT_EQ(wrong, 0) << format_name(format) << ", rank " << rank;
             if (!scales) return;
             const size_t bytes = scales.bytes() / static_cast<size_t>(total) * static_cast<size_t>(starts.back());
             const std::vector<uint8_t> got_scales = own_scales.get<uint8_t>(bytes);
             EXPECT_EQ(std::memcmp(got_scales.data(), scales.as<uint8_t>(), bytes), 0) << "rank " << rank;
           })) {
        EXPECT_EQ(t.status, Status::ok) << t.sentence;
      }
    }
  }
}

/// A step of either layer with all of it on the device, for calls that are captured.
struct DeviceStep {
  DeviceStep(const std::string& backend, bool pools_) : pools(pools_) {
    Random random(3);
    constexpr int32_t kSize = 4;
    config.heads = 8, config.head_dim = kDim, config.topk = 24, config.format = KeyFormat::fp8;
    config.pool_size = pools ? kSize : 0;
    const Array q_host = normals(DType::bf16, {kRows, 8, kDim}, random),
                w_host = normals(DType::f32, {kRows, 8}, random);
    const Array q8(DType::f8_e4m3fn, {kRows, 8, kDim}), w8(DType::f32, {kRows, 8});
    QuantizeQ quantize{};
    quantize.q = q_host.view(), quantize.weights = w_host.view(), quantize.q_out = q8.view();
    quantize.weights_out = w8.view();
    run(quantize, on("cpu"));
    const Array request(DType::i32, {kRows}), end(DType::i32, {kRows}), table(DType::i32, {1, 8});
    const Array positions(DType::i64, {kRows}), slots(DType::i64, {kRows}), tails(DType::i64, {kRows});
    for (int64_t r = 0; r < kRows; ++r) {
      request.as<int32_t>()[r] = 0, positions.as<int64_t>()[r] = r, tails.as<int64_t>()[r] = r % 8;
      const bool whole = !pools || (r + 1) % kSize == 0;
      end.as<int32_t>()[r] = static_cast<int32_t>(pools ? (r + 1) / kSize : r + 1);
      slots.as<int64_t>()[r] = whole ? (pools ? r / kSize : r) : -1;
    }
    for (int32_t i = 0; i < 8; ++i) table.as<int32_t>()[i] = i;
    const auto put = [&](const Array& a) { return kept.emplace_back(std::make_unique<OnGpu>(a))->view(); };
    step.q = {put(q8), {}, put(w8)};
    step.rows.count = kRows, step.rows.request = put(request), step.rows.end = put(end), step.rows.max_len = kRows;
    Array pages(DType::u8, {8, 16 * (kDim + 4)});
    std::memset(pages.as<uint8_t>(), 0xFF, pages.bytes());
    step.keys.cache = {put(pages), KeyFormat::fp8, Layout::planar, 16, kDim};
    step.keys.block_table = put(table), step.slot_mapping = put(slots);
    const DType dtype = pools ? DType::bf16 : DType::f32;
    step.k = put(normals(dtype, {kRows, kDim}, random));
    if (pools) {
      step.gate = put(normals(dtype, {kRows, kDim}, random)),
      step.ape = put(normals(DType::f32, {kSize, kDim}, random));
      step.positions = put(positions), step.tail_slots = put(tails);
      step.tail = put(normals(DType::bf16, {1, 2, 8, kDim}, random));
    }
    indices = std::make_unique<OnGpu>(Array(DType::i32, {kRows + 1, kColumns}));
    step.out.indices = indices->view();
    const Exec exec = on(backend);
    room = std::make_unique<GpuBytes>(bytes(exec));
  }
  static Array normals(DType dtype, std::initializer_list<int64_t> shape, Random& random) {
    const Array a(dtype, shape);
    for (int64_t i = 0; i < a.size(); ++i) {
      if (dtype == DType::f32) a.as<float>()[i] = random.normal();
      if (dtype == DType::bf16) a.as<uint16_t>()[i] = float_to_bf16(random.normal());
    }
    return a;
  }
  size_t bytes(const Exec& exec) const {
    const IndexerLimits limits{0, kRows, 1, kRows, 1};
    return pools ? SparseAttnIndexerKpool(config).workspace_bytes(limits, exec)
                 : SparseAttnIndexer(config).workspace_bytes(limits, exec);
  }
  void forward(Exec exec) const {
    exec.workspace = room->data(), exec.workspace_bytes = room->size();
    if (pools) return SparseAttnIndexerKpool(config).forward(step, exec);
    SparseAttnIndexer(config).forward(step, exec);
  }
  std::vector<int32_t> answer() const { return indices->ints(); }

  static constexpr int32_t kDim = 128;
  static constexpr int64_t kRows = 50, kColumns = 32;
  bool pools;
  IndexerConfig config{};
  IndexerStep step{};
  std::vector<std::unique_ptr<OnGpu>> kept;
  std::unique_ptr<OnGpu> indices;
  std::unique_ptr<GpuBytes> room;
};

/// The buffer is cleared, keys or pools are stored and rows are answered by a graph as by the calls; the row behind the
/// step's is nobody's.
TEST_P(ShardOnGpu, BothLayersAreReplayed) {
  prepare(Device::cuda);
  for (const bool pools : {false, true}) {
    const Stream stream;
    DeviceStep s(GetParam(), pools);
    const Exec exec = exec_of(GetParam(), stream);
    s.indices->poison();
    s.forward(exec);
    stream.wait();
    const std::vector<int32_t> eager = s.answer();
    const std::vector<int32_t> last(eager.end() - DeviceStep::kColumns, eager.end());
    EXPECT_EQ(last, std::vector<int32_t>(DeviceStep::kColumns, static_cast<int32_t>(0xA5A5A5A5))) << pools;
    EXPECT_EQ(eager[0], pools ? -1 : 0);
    const GraphOf graph(stream, [&] { s.forward(exec); });
    for (int i = 0; i < 2; ++i) {
      s.indices->poison();
      graph.replay();
      EXPECT_EQ(s.answer(), eager) << pools;
    }
  }
}

/// Who gets device memory, and who may be captured.
TEST_P(ShardOnGpu, TransportsSayWhatTheyTake) {
  constexpr int64_t kRows = 6, kWidth = 4;
  const int64_t sizes[] = {kRows};
  const Stream stream;
  const GpuBytes buffer(kRows * kWidth * 4);
  ExchangeRows e{};
  e.buffer = tensor(buffer.data(), DType::i32, {kRows, kWidth}), e.width = kWidth, e.row_shard_sizes = sizes;
  prepare(Device::cuda);
  const Exec exec = exec_of(GetParam(), stream);
  for (const uint32_t flags :
       {uint32_t{0}, uint32_t{TOPKEY_COMM_BLOCKS}, uint32_t{TOPKEY_COMM_BLOCKS} | TOPKEY_COMM_DEVICE}) {
    OneRank comm(flags);
    exchange_rows(e, comm, exec);
    stream.wait();
    EXPECT_EQ(comm.on_device, flags != TOPKEY_COMM_BLOCKS) << flags;
    EXPECT_EQ(comm.on_host, flags == TOPKEY_COMM_BLOCKS) << flags;
    const OnGpu mark(Array(DType::i32, {8}));
    const GraphOf graph(stream, [&] {
      const Thrown thrown = thrown_by([&] { exchange_rows(e, comm, exec); });
      EXPECT_EQ(thrown.status, (flags & TOPKEY_COMM_BLOCKS) != 0 ? Status::unsupported : Status::ok) << thrown.sentence;
      if (thrown.status == Status::unsupported) {
        EXPECT_NE(thrown.sentence.find("exec.stream must not be captured where a communicator blocks"),
                  std::string::npos)
            << thrown.sentence;
      }
      must(cudaMemsetAsync(mark.view().data, 7, 32, stream.stream));
    });
    graph.replay();
    EXPECT_EQ(mark.ints(), std::vector<int32_t>(8, 0x07070707)) << "the capture was spoilt";
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ShardOnGpu, ::testing::ValuesIn(gpu_backends()), backend_label);

}  // namespace
}  // namespace topkey::testing
