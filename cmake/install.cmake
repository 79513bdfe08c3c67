# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# Install rules: library, headers, CMake package, licences, and the command line where it is built.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/topkey)
install(TARGETS topkey EXPORT topkeyTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/topkey DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(EXPORT topkeyTargets NAMESPACE topkey:: DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE-APACHE ${PROJECT_SOURCE_DIR}/LICENSE-MIT DESTINATION ${CMAKE_INSTALL_DOCDIR})

# A static library hands its own dependencies on.
file(WRITE ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "include(CMakeFindDependencyMacro)\n")
if(NOT BUILD_SHARED_LIBS)
  file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "find_dependency(hwy)\n")
  if(TARGET topkey_cuda)
    file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "find_dependency(CUDAToolkit)\n")
  endif()
  if(OpenMP_CXX_FOUND)
    file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "find_dependency(OpenMP COMPONENTS CXX)\n")
  endif()
  file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "find_dependency(Threads)\n")
  if(TOPKEY_MPI)
    file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "find_dependency(MPI COMPONENTS CXX)\n")
  endif()
  if(TOPKEY_NCCL)
    file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "find_dependency(CUDAToolkit)\n")
  endif()
endif()
file(APPEND ${PROJECT_BINARY_DIR}/topkeyConfig.cmake "include(\"\${CMAKE_CURRENT_LIST_DIR}/topkeyTargets.cmake\")\n")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/topkeyConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/topkeyConfig.cmake ${PROJECT_BINARY_DIR}/topkeyConfigVersion.cmake
        DESTINATION ${package_dir})

if(TARGET topkey_cli)
  install(TARGETS topkey_cli)
endif()
