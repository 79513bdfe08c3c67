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

/// What follows from other arguments.
void complete(const char* op, RankArgs& a, Communicator* comm, Communicator* prefill,
              const std::vector<int64_t>& sizes) {
  a.config.heads = static_cast<int32_t>(a.step.q.values.shape[1]);
  a.config.head_dim = a.step.keys.cache.head_dim, a.config.format = a.step.keys.cache.format;
  if (a.config.role != CandidateRole::none)
    a.config.candidate_topk_blocks = static_cast<int32_t>(a.step.candidates.shape[1]);
  a.step.keys.shard = a.spec.context;
  a.shard.comm = comm, a.shard.prefill_comm = prefill;
  a.shard.gathered.format = a.step.keys.cache.format;
  if (!sizes.empty()) {
    // The library takes as many as there are ranks.
    if (sizes.size() != static_cast<size_t>(comm->size())) {
      throw nb::value_error((std::string(op) + ": row_shard_sizes must be of " + std::to_string(comm->size()) +
                             " ranks, got " + std::to_string(sizes.size()))
                                .c_str());
    }
    a.spec.row_rank = comm->rank(), a.spec.row_shards = comm->size();
    a.shard.row_shard_sizes = sizes.data();
  }
  if (prefill != nullptr) a.spec.prefill_rank = prefill->rank(), a.spec.prefill_size = prefill->size();
}

/// As long as the step's own arrays are.
IndexerLimits limits_of(const RankArgs& a) {
  IndexerLimits limits{};
  const int64_t requests = std::max<int64_t>(1, a.step.keys.block_table.shape[0]);
  limits.max_rows = std::max({a.step.rows.count, a.step.k.shape[0], a.step.slot_mapping.shape[0]});
  limits.max_requests = requests;
  limits.max_len = std::max(a.step.rows.max_len, (a.shard.total_keys + requests - 1) / requests);
  limits.max_next_n = a.step.rows.next_n;
  return limits;
}

size_t bytes_of(bool pools, const RankArgs& a, const Exec& exec) {
  return pools ? sharded_workspace_bytes(SparseAttnIndexerKpool(a.config), limits_of(a), a.spec, exec)
               : sharded_workspace_bytes(SparseAttnIndexer(a.config), limits_of(a), a.spec, exec);
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

void forward(bool pools, const nb::dict& fields, const std::vector<int64_t>& row_shard_sizes, Communicator* comm,
             Communicator* prefill, nb::handle tuple) {
  guarded([&] {
    const char* op = pools ? "indexer_kpool_forward_sharded" : "indexer_forward_sharded";
    Borrowed arrays(op, false);
    RankArgs args{};
    std::optional<Setting> setting;
    or_tell(comm, prefill, [&] {
      read_fields(rank_table(), op, fields, reinterpret_cast<char*>(&args), arrays);
      complete(op, args, comm, prefill, row_shard_sizes);
      setting.emplace(op, tuple, arrays);
      setting->add_workspace(bytes_of(pools, args, setting->exec), arrays.first());
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
      .def_prop_ro("received_bytes", &Communicator::received_bytes);
  m.def("communicator", &communicator_of);
  m.def("local_communicators", [](int32_t size, double seconds) {
    return guarded([&] {
      nb::list all;
      for (auto& one : local_communicators(size, seconds)) all.append(owned(std::move(one)));
      return all;
    });
  });
  m.def("sharded_workspace_bytes", &worst_bytes);
  m.def("forward_sharded", &forward, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg());
}

}  // namespace topkey::python
