// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where each operation writes: the output fields of its argument struct, by name, for visitors like those of
// call_fields.h. A struct that is read and written, such as the pages of a cache, stands in both.
#pragma once
#include "support/call_fields.h"
#include "topkey/topkey.h"

namespace topkey::support {

template <class Io>
void output_fields(Io& io, Selection& out) {
  io("out.indices", out.indices);
  io("out.slots", out.slots);
  io("out.scores", out.scores);
  io("out.counts", out.counts);
  io("out.blocks", out.blocks);
}
template <class Io>
void output_fields(Io& io, DenseKeys& out) {
  io("out.values", out.values);
  io("out.scales", out.scales);
}
template <class Io>
void output_fields(Io& io, ExpandRows& a) {
  io("row_request", a.row_request);
  io("lens", a.lens);
  io("positions", a.positions);
  io("slots", a.slots);
}
template <class Io>
void output_fields(Io& io, ToSlots& a) {
  io("slots", a.slots);
  io("counts", a.counts);
}
template <class Io>
void output_fields(Io& io, QuantizeQ& a) {
  io("q_out", a.q_out);
  io("q_scales_out", a.q_scales_out);
  io("weights_out", a.weights_out);
}
template <class Io>
void output_fields(Io& io, StoreK& a) {
  io("cache", a.cache.pages);
}
template <class Io>
void output_fields(Io& io, GatherK& a) {
  io("out.format", a.out.format, kFormatNames);
  output_fields(io, a.out);
}
template <class Io>
void output_fields(Io& io, SelectBlocks& a) {
  io("blocks", a.blocks);
}
template <class Io>
void output_fields(Io& io, PagedMqaTopk& a) {
  output_fields(io, a.out);
  io("block_scores", a.block_scores);
}
template <class Io>
void output_fields(Io& io, PoolK& a) {
  io("cache", a.cache.pages);
  io("tail", a.tail);
}
template <class Io>
void output_fields(Io& io, CompressK& a) {
  io("cache", a.cache.pages);
  io("state", a.state);
}
/// All others: a matrix of logits, or what their `out` has.
template <class Io, class Args>
void output_fields(Io& io, Args& a) {
  if constexpr (requires { a.logits; }) {
    io("logits", a.logits);
  } else {
    output_fields(io, a.out);
  }
}

}  // namespace topkey::support
