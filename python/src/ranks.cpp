// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Ranks in Python: communicators (threads of this process, or methods of a Python object) and the step of a layer on one
// of several ranks. A step releases the GIL; a transport's methods take it for as long as they run.
#include "python/src/ranks.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "python/src/call.h"
#include "python/src/fields.h"
#include "python/src/parts.h"
#include "python/src/setting.h"

namespace topkey::python {
namespace {

/// all_gather(send, receive), all_gatherv(send, receive, sizes) and fail(sentence) of a Python object, on host memory.
class PythonCommunicator final : public Communicator {
 public:
  PythonCommunicator(nb::object transport, int32_t rank, int32_t size)
      : Communicator(rank, size), transport_(std::move(transport)) {}

  void all_gather(const void* send, void* receive, size_t bytes, void*) override {
    const nb::gil_scoped_acquire held;
    transport_.attr("all_gather")(view(send, bytes), view(receive, bytes * static_cast<size_t>(size())));
  }
  void all_gatherv(const void* send, void* receive, const size_t* bytes, void*) override {
    const nb::gil_scoped_acquire held;
    nb::list sizes;
    for (int32_t r = 0; r < size(); ++r) sizes.append(bytes[r]);
    const size_t all = std::accumulate(bytes, bytes + size(), size_t{0});
    transport_.attr("all_gatherv")(view(send, bytes[rank()]), view(receive, all), sizes);
  }
  void fail(const char* sentence) noexcept override {
    const nb::gil_scoped_acquire held;
    try {
      if (nb::hasattr(transport_, "fail")) transport_.attr("fail")(sentence);
    } catch (...) {  // this rank has an error of its own to tell
      PyErr_Clear();
    }
  }

 private:
  static nb::object view(const void* data, size_t bytes) {
    return nb::steal(PyMemoryView_FromMemory(static_cast<char*>(const_cast<void*>(data)),
                                             static_cast<Py_ssize_t>(bytes), PyBUF_READ));
  }
  static nb::object view(void* data, size_t bytes) {
    return nb::steal(PyMemoryView_FromMemory(static_cast<char*>(data), static_cast<Py_ssize_t>(bytes), PyBUF_WRITE));
  }

  nb::object transport_;
};

/// Python owns it from here on.
nb::object owned(std::unique_ptr<Communicator> comm) { return nb::cast(comm.release(), nb::rv_policy::take_ownership); }

nb::object communicator_of(nb::object transport, int32_t rank, int32_t size) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw nb::value_error(("communicator: rank must be from 0 to size - 1, got rank " + std::to_string(rank) + " of " +
                           std::to_string(size))
                              .c_str());
  }
  return owned(std::make_unique<PythonCommunicator>(std::move(transport), rank, size));
}

/// Rows of each rank of `comm`; nothing for None, which is no cut.
std::vector<int64_t> shard_sizes(const std::string& op, nb::handle sizes, const Communicator* comm) {
  if (sizes.is_none()) return {};
  std::vector<int64_t> rows;
  if (!nb::try_cast(sizes, rows)) {
    throw nb::value_error(
        (op + ": row_shard_sizes must be whole numbers of 64 bits, got " + nb::repr(sizes).c_str()).c_str());
  }
  const int32_t ranks = comm == nullptr ? 0 : comm->size();
  if (ranks < 1 || rows.size() != static_cast<size_t>(ranks)) {
    throw nb::value_error(
        (op + ": row_shard_sizes must be of " + std::to_string(ranks) + " ranks, got " + std::to_string(rows.size()))
            .c_str());
  }
  return rows;
}

/// What follows from other arguments.
void complete(RankArgs& a, Communicator* comm, Communicator* prefill, const std::vector<int64_t>& sizes) {
  a.config.heads = static_cast<int32_t>(a.step.q.values.shape[1]);
  a.config.head_dim = a.step.keys.cache.head_dim, a.config.format = a.step.keys.cache.format;
  if (a.config.role != CandidateRole::none)
    a.config.candidate_topk_blocks = static_cast<int32_t>(a.step.candidates.shape[1]);
  a.step.keys.shard = a.spec.context;
  a.shard.comm = comm, a.shard.prefill_comm = prefill;
  a.shard.gathered.format = a.step.keys.cache.format;
  if (!sizes.empty()) {
    a.spec.row_rank = comm->rank(), a.spec.row_shards = comm->size();
    a.shard.row_shard_sizes = sizes.data();
  }
  if (prefill != nullptr) a.spec.prefill_rank = prefill->rank(), a.spec.prefill_size = prefill->size();
}

/// As long as the step's own arrays are.
IndexerLimits limits_of(const RankArgs& a) {
  IndexerLimits limits{};
  limits.max_rows = std::max({a.step.rows.count, a.step.k.shape[0], a.step.slot_mapping.shape[0]});
  limits.max_requests = std::max<int64_t>(1, a.step.keys.block_table.shape[0]);
  limits.max_len = a.step.rows.max_len;
  limits.max_next_n = a.step.rows.next_n;
  return limits;
}

template <class Layer>
size_t bytes_of(const Layer& layer, const RankArgs& a, const Exec& exec) {
  IndexerLimits limits = limits_of(a);
  if (!a.spec.context.active() || a.spec.prefill_size <= 1) return sharded_workspace_bytes(layer, limits, a.spec, exec);
  // Gathered keys are as many as the step says, however long one request might be: they are asked for by themselves.
  const int64_t keys = std::clamp<int64_t>(a.shard.total_keys, 0, a.shard.gathered.values.shape[0]);
  IndexerLimits gathered = limits;
  gathered.max_len = (keys + limits.max_requests - 1) / limits.max_requests;
  ShardSpec context = a.spec;
  context.prefill_rank = context.prefill_size = 0;
  limits.max_rows = std::min<int64_t>(limits.max_rows * a.spec.prefill_size, INT32_MAX);
  return std::max(sharded_workspace_bytes(layer, gathered, a.spec, exec),
                  sharded_workspace_bytes(layer, limits, context, exec));
}

/// What goes wrong before the library has the step is told to the peers here; they would wait.
template <class Body>
void or_tell(Communicator* comm, Communicator* prefill, const Body& body) {
  try {
    body();
  } catch (const std::exception& e) {
    for (Communicator* one : {comm, prefill}) {
      if (one != nullptr) one->fail(e.what());
    }
    throw;
  }
}

void forward(bool pools, const nb::dict& fields, const nb::object& row_shard_sizes, Communicator* comm,
             Communicator* prefill, nb::handle tuple) {
  guarded([&] {
    const char* op = pools ? "indexer_kpool_forward_sharded" : "indexer_forward_sharded";
    Borrowed arrays(op, false);
    RankArgs args{};
    std::vector<int64_t> sizes;
    std::optional<Setting> setting;
    or_tell(comm, prefill, [&] {
      read_fields(rank_table(), op, fields, reinterpret_cast<char*>(&args), arrays);
      sizes = shard_sizes(op, row_shard_sizes, comm);
      complete(args, comm, prefill, sizes);
      setting.emplace(op, tuple, arrays);
      const Exec& exec = setting->exec;
      setting->add_workspace(pools ? bytes_of(SparseAttnIndexerKpool(args.config), args, exec)
                                   : bytes_of(SparseAttnIndexer(args.config), args, exec),
                             arrays.first());
    });
    const nb::gil_scoped_release released;
    if (pools) {
      forward_sharded(SparseAttnIndexerKpool(args.config), args.step, args.spec, args.shard, setting->exec);
    } else {
      forward_sharded(SparseAttnIndexer(args.config), args.step, args.spec, args.shard, setting->exec);
    }
  });
}

/// Of the worst step: `numbers` by name, format by its own.
size_t worst_bytes(bool pools, const nb::dict& numbers, const std::string& format, const std::string& backend) {
  return guarded([&] {
    const auto number = [&](const char* name) { return nb::cast<int32_t>(numbers[name]); };
    IndexerConfig config{};
    config.heads = number("heads"), config.head_dim = number("head_dim"), config.topk = number("topk");
    config.format = support::format_by_name(format);
    if (const int32_t blocks = number("blocks"); blocks > 0) {
      config.role = CandidateRole::source, config.candidate_block_size = 1, config.candidate_topk_blocks = blocks;
    }
    ShardSpec spec{};
    spec.context = {0, number("world_size"), number("interleave")};
    spec.row_shards = number("row_shards"), spec.prefill_size = number("prefill_size");
    const IndexerLimits limits{0, number("max_rows"), number("max_requests"), number("max_len"), number("max_next_n")};
    Exec exec{};
    exec.backend = backend.c_str();
    for (const BackendInfo& b : backends()) {
      if (b.name == backend) exec.device = b.device;
    }
    return pools ? sharded_workspace_bytes(SparseAttnIndexerKpool(config), limits, spec, exec)
                 : sharded_workspace_bytes(SparseAttnIndexer(config), limits, spec, exec);
  });
}

}  // namespace

void bind_ranks(nb::module_& m) {
  nb::class_<Communicator>(m, "Communicator")
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("received_bytes", &Communicator::received_bytes)
      .def("fail", [](Communicator& comm, const std::string& sentence) { comm.fail(sentence.c_str()); });
  m.def("communicator", &communicator_of);
  m.def("local_communicators", [](int32_t size, double seconds) {
    return guarded([&] {
      nb::list all;
      for (auto& one : local_communicators(size, seconds)) all.append(owned(std::move(one)));
      return all;
    });
  });
  // Handles as addresses: of an MPI_Comm (0: the world), an ncclComm_t.
  m.def("mpi_communicator", [](uintptr_t comm, double seconds) {
    return guarded([&] {
      std::unique_ptr<Communicator> made;
      {
        const nb::gil_scoped_release released;  // MPI waits for the other ranks here
        made = mpi_communicator(reinterpret_cast<const void*>(comm), seconds);
      }
      return owned(std::move(made));
    });
  });
  m.def("nccl_communicator", [](uintptr_t comm, double seconds) {
    return guarded([&] { return owned(nccl_communicator(reinterpret_cast<void*>(comm), seconds)); });
  });
  m.def("transport_unusable", &topkey_transport_unusable);
  m.def("sharded_workspace_bytes", &worst_bytes);
  m.def("forward_sharded", &forward, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
        nb::arg());
}

}  // namespace topkey::python
