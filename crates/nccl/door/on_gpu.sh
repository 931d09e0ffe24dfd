#!/bin/bash
# All-reduce by NCCL over its own sockets and over Weft, among processes that share one GPU and look like hosts; a rank that is killed; profiler and tuner.
# Needs nvcc, MPS and the NCCL of pip (nvidia-nccl). usage: on_gpu.sh LIBRARY
set -u
library=$(realpath "$1")
here=$(dirname "$(realpath "$0")")
cd "$(mktemp -d)" || exit 1
nccl=$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])')
nvcc -O2 -std=c++17 "$here/ranks.cu" -o ranks \
  -I"$nccl/include" -L"$nccl/lib" -l:libnccl.so.2 -Xlinker -rpath="$nccl/lib" || exit 1
export WEFT_SECRET=${WEFT_SECRET:-one secret for all ranks} WEFT_LISTEN=127.0.0.1:0 NCCL_SOCKET_IFNAME=lo
weft="NCCL_NET_PLUGIN=$library"
tuned="NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"
one() { echo "== $1"; shift; timeout 60 env "$@" 2>&1 | tail -12; }
one "a rank is killed" "$weft" ./ranks 2 0
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
nvidia-cuda-mps-control -d
sizes="1024 65536 4194304 67108864 268435456"
for ranks in 2 4; do
  one "sockets, $ranks ranks" NCCL_NET_PLUGIN=none ./ranks $ranks $sizes
  one "tuned sockets, $ranks ranks" NCCL_NET_PLUGIN=none $tuned ./ranks $ranks $sizes
  one "weft over shared memory, $ranks ranks" "$weft" ./ranks $ranks $sizes
  one "weft over tcp, $ranks ranks" "$weft" WEFT_TRANSPORTS=tcp WEFT_TCP_CONNECTIONS=4 ./ranks $ranks $sizes
done
echo "== the profiler, without and with"
for profiler in none "$library" none "$library"; do
  timeout 60 env NCCL_NET_PLUGIN=none NCCL_PROFILER_PLUGIN="$profiler" ./ranks 2 1048576 1048576 1048576
done
one "the tuner" "$weft" NCCL_TUNER_PLUGIN="$library" NCCL_WEFT_SYSTEM=dgx-h200 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=TUNING ./ranks 2 $sizes
echo quit | nvidia-cuda-mps-control
