// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// TopKey, the sparse attention indexer: everything. Read the files in this order: they are the pipeline.
//
//   k [T,D] -> quantize -> cache (pages) --block_table--+
//   q [R,H,D], weights [R,H] -> quantize ---------------+-> search ( = score + select ) -> merge -> indices, slots [R,topk]
#pragma once
// The order is the reading order.
// clang-format off
#include "topkey/version.h"
#include "topkey/error.h"
#include "topkey/types.h"
#include "topkey/number.h"
#include "topkey/format.h"
#include "topkey/rows.h"
#include "topkey/quantize.h"
#include "topkey/cache.h"
#include "topkey/pool.h"
#include "topkey/score.h"
#include "topkey/select.h"
#include "topkey/search.h"
#include "topkey/merge.h"
#include "topkey/plan.h"
#include "topkey/indexer.h"
#include "topkey/shard.h"
#include "topkey/backend.h"
// clang-format on
