// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// One rank of a run over MPI. Every process makes the same requests, answers them alone with all keys, and as one of the
// ranks with its own part: the two must be equal. The other scenes go wrong on one rank. Usage: mpirun -np N mpi_ranks
// SCENE; the exit code is 0 where this rank has seen what it should.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "tests/cluster.h"

namespace topkey::testing {
namespace {

int fail(int32_t rank, const std::string& what) {
  std::fprintf(stderr, "rank %d: %s\n", static_cast<int>(rank), what.c_str());
  return 1;
}

/// Each kind of cut, and those of pools; three steps with prompts and drafts.
int equal(Communicator& comm, Communicator& prefill) {
  std::vector<std::vector<uint64_t>> tokens(3);
  Random random(11);
  for (auto& request : tokens) {
    for (int t = 0; t < 200; ++t) request.push_back(random.next());
  }
  const std::pair<Kind, bool> cuts[] = {
      {Kind::context, false}, {Kind::rows, false},   {Kind::prefill, false},         {Kind::context, true},
      {Kind::rows, true},     {Kind::prefill, true}, {Kind::prefill_context, false}, {Kind::prefill_context, true}};
  for (const auto& [kind, pools] : cuts) {
    ClusterSpec spec;
    spec.kind = kind, spec.pools = pools, spec.world = comm.size(), spec.interleave = 4, spec.rope = !pools;
    spec.ratio = pools ? 2 : 1;
    spec.role = CandidateRole::source, spec.force_first = 1, spec.force_last = 2, spec.exchange_limit = 5000;
    Replica alone(spec, Shard{}, 1), own = replica_of(spec, comm.rank());
    std::vector<int64_t> cached(3, 0);
    for (int step = 0; step < 3; ++step) {
      std::vector<Turn> turns;
      for (size_t b = 0; b < 3; ++b) {
        const bool decodes = step > 0 && b < 2;
        const int64_t rows = decodes ? 1 + step : 17 * static_cast<int64_t>(b + 1);
        turns.push_back({b, cached[b], rows, decodes, &tokens[b]});
        cached[b] += rows;
      }
      const StepData data = step_data(spec, turns, static_cast<uint64_t>(step));
      if (!alone.make_room(data) || !own.make_room(data)) return fail(comm.rank(), "the pool is too small");
      Exec exec{};
      exec.threads = 1;
      const std::string found = difference(answer_alone(spec, alone, data, exec),
                                           answer_rank(spec, own, data, comm.rank(), {&comm, &prefill}, exec));
      if (!found.empty()) return fail(comm.rank(), spec.text() + ": " + found);
    }
  }
  return comm.received_bytes() > 0 ? 0 : fail(comm.rank(), "nothing was exchanged");
}

/// One step with `spec` as this rank has it.
Thrown step_of(Communicator& comm, const ClusterSpec& spec, const char* backend, Communicator* prefill = nullptr) {
  std::vector<uint64_t> tokens;
  for (uint64_t t = 0; t < 200; ++t) tokens.push_back(t + 1);
  const StepData data = step_data(spec, {{0, 0, 30, false, &tokens}}, 1);
  Replica own = replica_of(spec, comm.rank());
  own.make_room(data);
  Exec exec{};
  exec.threads = 1, exec.backend = backend;
  return thrown_by([&] { answer_rank(spec, own, data, comm.rank(), {&comm, prefill}, exec); });
}

int expect(int32_t rank, const Thrown& thrown, Status status, const char* words) {
  const bool told = thrown.status == status && thrown.sentence.find(words) != std::string::npos;
  return told ? 0 : fail(rank, "expected '" + std::string(words) + "', got '" + thrown.sentence + "'");
}

int scene(const std::string& name, Communicator& comm, Communicator& prefill) {
  const int32_t rank = comm.rank();
  ClusterSpec spec;
  spec.world = comm.size();
  if (name == "equal") return equal(comm, prefill);
  if (name == "raises") {
    const Thrown thrown = step_of(comm, spec, rank == 1 ? "no such backend" : nullptr);
    return rank == 1 ? expect(rank, thrown, Status::unsupported, "no such backend")
                     : expect(rank, thrown, Status::peer_error, "rank 1 failed: ");
  }
  if (name == "disagrees") {
    if (rank == 1) spec.interleave = 8;
    return expect(rank, step_of(comm, spec, nullptr), Status::peer_error,
                  "context.interleave must be the same on every rank, got 1 on rank 0 and 8 on rank 1");
  }
  if (name == "lacks") {
    spec.kind = Kind::prefill, spec.pools = true, spec.ratio = 2;
    if (rank == 1) spec.change = [](IndexerStep& s) { s.gate = Tensor{}; };
    return expect(rank, step_of(comm, spec, nullptr, &prefill), Status::peer_error,
                  "gate must be the same on every rank, got given on rank 0 and absent on rank 1");
  }
  if (name == "fewer") {
    if (rank == 1) spec.change = [](IndexerStep& s) { --s.rows.count; };
    return expect(rank, step_of(comm, spec, nullptr), Status::peer_error,
                  "rows.count must be the same on every rank, got 30 on rank 0 and 29 on rank 1");
  }
  if (name == "sizes") {
    std::vector<char> own(64), all(1024);
    const size_t bytes = rank == 0 ? 16 : 64;
    return expect(rank, thrown_by([&] { comm.all_gather(own.data(), all.data(), bytes, nullptr); }), Status::peer_error,
                  "rank");
  }
  if (name == "never_comes") {
    if (rank == 2) {
      std::this_thread::sleep_for(std::chrono::seconds(5));  // longer than the others have patience
      return 0;
    }
    return expect(rank, step_of(comm, spec, nullptr), Status::peer_error, "rank 2 did not answer within");
  }
  if (name == "exits") {
    if (rank == 1) {
      std::printf("rank 1 exits now\n");
      std::fflush(stdout);
      std::_Exit(3);
    }
    step_of(comm, spec, nullptr);
    return fail(rank, "answered without rank 1");
  }
  return fail(rank, "no scene " + name);
}

}  // namespace
}  // namespace topkey::testing

int main(int argc, char** argv) {
  using namespace topkey;
  const std::string name = argc > 1 ? argv[1] : "";
  const auto comm = mpi_communicator(nullptr, name == "never_comes" ? 1.0 : 60.0), prefill = mpi_communicator();
  const int code = topkey::testing::scene(name, *comm, *prefill);
  std::fflush(stdout);
  if (code == 0) std::printf("rank %d of %d: %s as it should be\n", comm->rank(), comm->size(), name.c_str());
  std::fflush(stdout);
  return code;
}
