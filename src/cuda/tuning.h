// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Numbers that tune, in one place. None of them changes a bit of a result.
#pragma once
#include <cstdint>

namespace topkey::cuda {

/// Scores that a search keeps at a time: 32 MiB, two thirds of an H200's L2, so that the selection finds them there.
constexpr int64_t kScoreEntries = 8 << 20;
/// Rows of which facts are kept at a time.
constexpr int64_t kGroupRows = 8192;
/// Rows at a time where a row's keys come in chunks: enough to fill a GPU, while a chunk stays far over any usual topk.
constexpr int64_t kChunkedRows = 128;
/// Winners carried between chunks, of all those rows (8 bytes each, twice, and as much for blocks): 7,680 a row, and with
/// the scores and all else less than 64 MiB.
constexpr int64_t kListEntries = 15 << 16;
/// Keys of a row that one thread block selects from at once; a longer row is cut into parts of so many, if its blocks
/// would leave SMs idle: rows times parts at most kPartBlocks, and kPartEntries winners of all parts.
constexpr int64_t kPartKeys = 16384;
constexpr int64_t kPartBlocks = 1024;
constexpr int64_t kPartEntries = 1 << 20;
/// Thread blocks that share a row of given scores on Hopper: more only where its scores would not fit. What blocks tell
/// each other grows with their number.
constexpr int kUsualCluster = 8;
/// Of such blocks, for each SM, in a grid at most; further rows are taken in turns.
constexpr int kClustersPerSm = 1 << 15;
/// Rows, and scores of each, from which a thread block picks from a whole row in one reading (pick_stream.cu).
constexpr int64_t kStreamRows = 32;
constexpr int64_t kStreamKeys = 16384;
/// Bytes of its next row that a block there asks for while it picks: with two blocks an SM 34 MB of a H200's L2 of 50. 1024
/// x 128K took 216 us before it and the faster picking came together, 192 with both.
constexpr uint32_t kStreamAhead = 128 * 1024;
/// Candidate ids kept at a time.
constexpr int64_t kIdEntries = 1 << 20;
/// Winners of a row that are sorted in shared memory; more are sorted in the workspace, by at most kSortBlocks blocks.
constexpr int64_t kSharedSort = 8192;
constexpr int64_t kSortBlocks = 8;
/// A merge whose parts are ascending: most entries of a row that each thread of its block holds, and bytes of shared memory
/// for positions and lists of winners (device/merge_quick.cuh, which has the rest of its numbers).
constexpr int kMergeEach = 16;
constexpr int kMergeBytes = 83 * 1024;

/// Shared memory of a thread block on the smallest GPU that is served.
constexpr int kSharedBytes = 99 * 1024;
/// Of it for queries in the score kernel: two blocks of 128 threads fit an SM.
constexpr int kQueryBytes = 72 * 1024;
/// Of an SM, for several blocks.
constexpr size_t kSharedOfSm = 200 * 1024;
/// How many blocks of the score kernel an SM's registers hold, of 128 threads with 168 registers.
constexpr size_t kBlocksOfRegisters = 3;
/// Query rows that share one read of their keys.
constexpr int kMaxTileRows = 8;
/// The same where each of a block's 12 warps has 48 keys in registers: a block fills an SM, and its queries the shared
/// memory (12 rows of 64 heads). Keys of all warps.
constexpr int kWideTiles = 3, kWideThreads = 384;
constexpr int kWideTileRows = 12;
constexpr uint32_t kWidePiece = kWideThreads / 32 * 16 * kWideTiles;

/// Prefill on Hopper (prefill_sm90.cu). Query rows from which it is taken, and winners up to which its lists suit.
constexpr int64_t kPrefillRows = 257;
constexpr int64_t kPrefillTopk = 2048;
/// Entries of a list's column (8,192 keys need about 77, 131,072 about 128 and twice the deviation that one sample leaves:
/// under 176 in nearly all of 2,048 rows; sixteen rows a thread block have room for 121), and the room for all lists: with
/// the facts less than 64 MiB.
constexpr int64_t kListLength = 192;
constexpr int64_t kPrefillListBytes = int64_t{63} << 20;
/// Of that for the best scores of candidate blocks, where they are published, 4 bytes each: 1,056 rows (a tile for each SM,
/// 64 heads) of 32,768 keys in blocks of 8 need 4.3 million.
constexpr int64_t kPrefillMaxima = 5 << 20;

}  // namespace topkey::cuda
