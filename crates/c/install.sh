#!/bin/sh
# Puts the C library where compilers, pkg-config and CMake find it:
#
#     cargo build --release -p weft-c && crates/c/install.sh PREFIX [target/release]
#
# What it puts there can be moved as a whole.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=${1:?"usage: install.sh PREFIX [DIRECTORY WITH libweft.so]"}
built=${2:-"$here/../../target/release"}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$here/../../Cargo.toml" | head -1)

mkdir -p "$prefix/include" "$prefix/lib/pkgconfig" "$prefix/lib/cmake/weft"
cp "$here/include/weft.h" "$here/include/weft.hpp" "$prefix/include/"
cp "$built/libweft.so" "$built/libweft.a" "$prefix/lib/"
cp "$here/cmake/weft-config.cmake" "$prefix/lib/cmake/weft/"
sed "s/@VERSION@/$version/" "$here/weft.pc.in" >"$prefix/lib/pkgconfig/weft.pc"
sed "s/@VERSION@/$version/" "$here/cmake/weft-config-version.cmake.in" >"$prefix/lib/cmake/weft/weft-config-version.cmake"
