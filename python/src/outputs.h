// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// Where each operation writes: the output fields of its argument struct, one overload an operation.
#pragma once
#include "support/call_fields.h"
#include "topkey/topkey.h"

namespace topkey::python {

template <class Io>
void outputs(Io& io, Selection& out) {
  io("out.indices", out.indices);
  io("out.slots", out.slots);
  io("out.scores", out.scores);
  io("out.counts", out.counts);
  io("out.blocks", out.blocks);
}
template <class Io>
void outputs(Io& io, DenseKeys& out) {
  io("out.values", out.values);
  io("out.scales", out.scales);
}
template <class Io>
void outputs(Io& io, ExpandRows& a) {
  io("row_request", a.row_request);
  io("lens", a.lens);
  io("positions", a.positions);
  io("slots", a.slots);
}
template <class Io>
void outputs(Io& io, ToSlots& a) {
  io("slots", a.slots);
  io("counts", a.counts);
}
template <class Io>
void outputs(Io& io, QuantizeQ& a) {
  io("q_out", a.q_out);
  io("q_scales_out", a.q_scales_out);
  io("weights_out", a.weights_out);
}
template <class Io>
void outputs(Io& io, QuantizeK& a) {
  outputs(io, a.out);
}
template <class Io>
void outputs(Io& io, StoreK& a) {
  io("cache", a.cache.pages);
}
template <class Io>
void outputs(Io& io, GatherK& a) {
  io("out.format", a.out.format, support::kFormatNames);
  outputs(io, a.out);
}
template <class Io>
void outputs(Io& io, MqaLogits& a) {
  io("logits", a.logits);
}
template <class Io>
void outputs(Io& io, PagedMqaLogits& a) {
  io("logits", a.logits);
}
template <class Io>
void outputs(Io& io, Topk& a) {
  outputs(io, a.out);
}
template <class Io>
void outputs(Io& io, SelectBlocks& a) {
  io("blocks", a.blocks);
}
template <class Io>
void outputs(Io& io, MqaTopk& a) {
  outputs(io, a.out);
}
template <class Io>
void outputs(Io& io, PagedMqaTopk& a) {
  outputs(io, a.out);
  io("block_scores", a.block_scores);
}
template <class Io>
void outputs(Io& io, MergeTopk& a) {
  outputs(io, a.out);
}
template <class Io>
void outputs(Io& io, PoolK& a) {
  io("cache", a.cache.pages);
  io("tail", a.tail);
}
template <class Io>
void outputs(Io& io, CompressK& a) {
  io("cache", a.cache.pages);
  io("state", a.state);
}
template <class Io>
void outputs(Io& io, ExpandPools& a) {
  outputs(io, a.out);
}

}  // namespace topkey::python
