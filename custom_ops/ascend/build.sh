#!/bin/sh
# Builds the operator package with CANN: build_out/custom_opp_*.run. Arguments go to the CMake configuration.
set -eu
cd "$(dirname "$0")"

if [ -z "${ASCEND_HOME_PATH:-}" ]; then
    echo "build.sh needs CANN: run 'source <CANN>/set_env.sh' first (it sets ASCEND_HOME_PATH)" >&2
    exit 1
fi
command -v cmake >/dev/null || { echo "build.sh needs cmake 3.19 or newer" >&2; exit 1; }

cmake --preset default "-DASCEND_CANN_PACKAGE_PATH=$ASCEND_HOME_PATH" "$@"
cmake --build build_out --target binary package -j "$(nproc)"
ls build_out/custom_opp_*.run
