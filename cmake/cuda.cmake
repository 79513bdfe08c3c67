# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The CUDA backend of the library, or its twin without CUDA. TOPKEY_CUDA: ON, OFF, or AUTO (ON where nvcc is found). The
# CUDA run-time library is linked statically: the library loads on a machine without a driver, and the backend says why
# it is not usable there.
include(CheckLanguage)

set(topkey_has_cuda ${TOPKEY_CUDA})
if(TOPKEY_CUDA STREQUAL "AUTO")
  check_language(CUDA)
  set(topkey_has_cuda OFF)
  if(CMAKE_CUDA_COMPILER)
    set(topkey_has_cuda ON)
  endif()
endif()

if(NOT topkey_has_cuda)
  target_sources(topkey PRIVATE src/cuda/no_cuda.cpp)
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # said below, in nvcc's own words
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(topkey_cuda_targets ${TOPKEY_CUDA_TARGETS})
if(NOT topkey_cuda_targets)
  set(topkey_cuda_targets sm_90a compute_80)
endif()
# sm_X: code of that GPU. compute_X: PTX, which the driver compiles for later ones.
foreach(target IN LISTS topkey_cuda_targets)
  string(REGEX REPLACE "^(sm|compute)_" "compute_" virtual ${target})
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=${virtual},code=${target}>")
endforeach()
set(topkey_cuda_sm90 false)
if("sm_90a" IN_LIST topkey_cuda_targets)
  set(topkey_cuda_sm90 true)
endif()
set_source_files_properties(src/cuda/launch.cpp PROPERTIES COMPILE_DEFINITIONS TOPKEY_CUDA_SM90=${topkey_cuda_sm90})
# Bits must not depend on what a compiler fuses: products and sums are fused only where __fmaf_rn is written.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-Xcompiler=-Wall,-Wextra,-ffp-contract=off>")
# A target of its own, made after the language is there. Its objects go into libtopkey.
file(GLOB topkey_cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
add_library(topkey_cuda OBJECT ${topkey_cuda_sources})
if(TOPKEY_CUDA_QUICK AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
  # Not Hopper's: only in optimised code does ptxas tell whether wgmma is serialised.
  set(topkey_cuda_quick ${topkey_cuda_sources})
  list(FILTER topkey_cuda_quick EXCLUDE REGEX "_sm90\\.cu$")
  set_source_files_properties(${topkey_cuda_quick} PROPERTIES COMPILE_OPTIONS --Ofast-compile=max)
endif()
set_target_properties(topkey_cuda PROPERTIES CUDA_ARCHITECTURES OFF CUDA_RUNTIME_LIBRARY Static)
# CMake 3.25 knows no flag of nvcc 13 for C++20, which the C++ sources ask for; device code is C++17.
set_target_properties(topkey_cuda PROPERTIES CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON)
target_include_directories(topkey_cuda PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_sources(topkey PRIVATE src/cuda/backend.cpp src/cuda/launch.cpp $<TARGET_OBJECTS:topkey_cuda>)
set_target_properties(topkey PROPERTIES CUDA_ARCHITECTURES OFF CUDA_RUNTIME_LIBRARY Static CUDA_STANDARD 17)
target_link_libraries(topkey PRIVATE CUDA::cudart_static)
