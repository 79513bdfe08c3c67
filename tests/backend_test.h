// SPDX-License-Identifier: Apache-2.0 OR MIT
//
// A fixture whose every test runs once on each usable host backend, so that the list of tests that ran names the
// backends.
#pragma once
#include <string>

#include "tests/testing.h"

namespace topkey::testing {

class BackendTest : public ::testing::TestWithParam<std::string> {
 protected:
  Exec exec() const { return on(GetParam()); }
};

inline std::string backend_label(const ::testing::TestParamInfo<std::string>& info) {
  std::string label = info.param;
  for (char& c : label) c = c == '.' ? '_' : c;  // GoogleTest wants identifiers
  return label;
}

#define TOPKEY_ON_EVERY_BACKEND(Fixture)                                                               \
  INSTANTIATE_TEST_SUITE_P(Backends, Fixture, ::testing::ValuesIn(::topkey::testing::every_backend()), \
                           ::topkey::testing::backend_label)
/// Without those that take few shapes.
#define TOPKEY_ON_GENERAL_BACKENDS(Fixture)                                                               \
  INSTANTIATE_TEST_SUITE_P(Backends, Fixture, ::testing::ValuesIn(::topkey::testing::general_backends()), \
                           ::topkey::testing::backend_label)

}  // namespace topkey::testing
