// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Every line of inline PTX of the Hopper backend: warpgroup products of e4m3 codes, asynchronous copies, fences, named
// barriers, clusters.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// Kernels have a body only where this is set. Code for other GPUs, PTX above all, must hold no instruction that these do
/// not know: their compiler would refuse the whole library (tests/lint/ptx.sh).
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TOPKEY_HAS_WGMMA 1
#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// 16 bytes of global memory to shared memory; bytes past `valid` (0 or 16) are zeros. Both addresses aligned to 16.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, uint32_t valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
/// 4 bytes likewise.
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, uint32_t valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until at most kPending of this thread's latest groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// What this thread wrote to shared memory becomes visible to the tensor cores' reads behind the next barrier.
__device__ __forceinline__ void fence_tensor_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Barriers in shared memory (8 bytes) that also count bytes of bulk copies. A phase ends when `arrivals` have come and
/// all bytes are there.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_at(uint64_t* barrier) { arrive_at(shared_address(barrier)); }
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// Until the phase of this parity has ended. The hint lets the thread sleep: one that looks every few cycles takes issue
/// slots and reads of shared memory from those that work.
__device__ __forceinline__ void wait_at(uint32_t barrier, uint32_t parity) {
  constexpr uint32_t kNanoseconds = 10000000;
  asm volatile(
      "{ .reg .pred p; wait_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2; @p bra done_%=; bra wait_%=; "
      "done_%=: }" ::"r"(barrier),
      "r"(parity), "r"(kNanoseconds)
      : "memory");
}
__device__ __forceinline__ void wait_at(uint64_t* barrier, uint32_t parity) {
  wait_at(shared_address(barrier), parity);
}
/// A tensor map (a kernel's parameter) is about to be used.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// A box of a tensor map to shared memory; coordinates from the innermost on.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int32_t x, int32_t y, int32_t z,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}
/// `bytes` (a multiple of 16) from one place to another, both aligned to 16.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

/// If `present`: 8 bytes to global memory, and the lower half of the address moves by kStep. Without a branch.
template <uint32_t kStep>
__device__ __forceinline__ void store_next_if(bool present, uint32_t& low, uint32_t high, uint32_t first,
                                              uint32_t second) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, %1, 0; mov.b64 a, {%0, %2}; "
      "@p st.global.cg.v2.b32 [a], {%3, %4}; @p add.u32 %0, %0, %5; }"
      : "+r"(low)
      : "r"(present ? 1 : 0), "r"(high), "r"(first), "r"(second), "n"(kStep)
      : "memory");
}
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ int32_t load_shared_int(uint32_t address) {
  int32_t value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

/// Adds one to a word of shared memory.
__device__ __forceinline__ void add_one(uint32_t address) {
  asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}
/// Sets bits of a word of shared memory, if `present`: without a branch.
__device__ __forceinline__ void set_bits_if(bool present, uint32_t address, uint32_t bits) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p red.shared.or.b32 [%1], %2; }" ::"r"(present ? 1 : 0),
               "r"(address), "r"(bits)
               : "memory");
}

/// Barrier `id` (1..15) of `threads` threads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Comes to the barrier without waiting there: counts for its others, which wait.
__device__ __forceinline__ void arrive_named_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// A barrier, and whether `flag` was set in any of them.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool flag) {
  uint32_t any;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(flag ? 1 : 0)
               : "memory");
  return any != 0;
}

/// A barrier, and in how many of them it was set.
__device__ __forceinline__ uint32_t named_barrier_count(int id, int threads, bool flag) {
  uint32_t count;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; bar.red.popc.u32 %0, %1, %2, p; }"
               : "=r"(count)
               : "r"(id), "r"(threads), "r"(flag ? 1 : 0)
               : "memory");
  return count;
}

/// A word of global memory by which thread blocks wait for each other: one more, behind what this thread has written; and
/// what it holds, before what this thread reads.
__device__ __forceinline__ void add_one_released(uint32_t* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}
__device__ __forceinline__ uint32_t load_acquired(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

/// Blocks of one cluster: which of them this one is, and a barrier of all their threads, behind which all see what any of
/// them wrote before (of a cluster of one, the compiler makes it the block's own).
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
}
/// What lies at p in this block's shared memory, as block `rank` of the cluster has it.
__device__ __forceinline__ uint32_t peer_address(const void* p, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}
__device__ __forceinline__ uint32_t load_peer(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_peer(uint32_t address, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ void store_peer(uint32_t address, uint64_t value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

#ifdef TOPKEY_HAS_WGMMA
/// Registers of each thread of a warpgroup, from here on: fewer, or more as soon as others have given them up.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// d (+)= A [64, 32] * B [32, kColumns] of e4m3 codes, both in shared memory (operand_at, dot_sm90.cuh); add = 0 sets d.
/// Thread t of the warpgroup holds of row 16 * (t / 32) + t % 32 / 4 columns 8j + 2 (t % 4) + {0, 1} in d[4j + {0, 1}],
/// and of the row eight below in d[4j + {2, 3}].
template <int kColumns>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int add);

template <>
__device__ __forceinline__ void wgmma_e4m3<32>(float (&d)[16], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 "
      "}, %16, %17, p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(add));
}

template <>
__device__ __forceinline__ void wgmma_e4m3<64>(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31 "
      "}, %32, %33, p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(add));
}

template <>
__device__ __forceinline__ void wgmma_e4m3<128>(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63 "
      "}, %64, %65, p, 1, 1; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(add));
}

#endif

}  // namespace topkey::cuda
