// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// The serving test: 200 steps of a random serving day (serving_day.h) of every geometry on every backend.
#include "tests/serving_day.h"

namespace topkey::testing {
namespace {

class Serving : public BackendTest {};

TEST_P(Serving, EveryAnswerOfADayEqualsOneFromScratch) {
  int lived = 0;
  for (const Geometry& geometry : geometries()) {
    lived += live_through(geometry, GetParam(), forward_eager, false);
    if (HasFailure()) return;
  }
  // Those of the host take them all.
  const auto all = static_cast<int>(geometries().size());
  EXPECT_GE(lived, exec().device == Device::cpu ? all : 1);
}
TOPKEY_ON_EVERY_BACKEND(Serving);

}  // namespace
}  // namespace topkey::testing
