/* An all-reduce of Weft's as a function that XLA calls from compiled programs: examples/20_jax_ffi.py compiles, loads and calls it.
 *
 * XLA hands over the buffers of its own arrays, and this reduces from one into the other. What goes wrong is an error of the program that
 * called, with Weft's words. */
#include <cstdint>

#include <weft.h>
#include <xla/ffi/api/ffi.h>

namespace ffi = xla::ffi;

namespace {

weft_communicator *ranks = nullptr;

ffi::Error failed() { return ffi::Error(ffi::ErrorCode::kInternal, weft_last_error()); }

ffi::Error all_reduce(ffi::Buffer<ffi::F32> input, ffi::ResultBuffer<ffi::F32> output, int64_t deadline_ms) {
    weft_call_options options = {sizeof options, static_cast<uint64_t>(deadline_ms) * 1000000, nullptr, 0, 0};
    const weft_status status = weft_all_reduce(ranks, input.typed_data(), output->typed_data(), input.element_count(), WEFT_F32,
                                               WEFT_SUM, &options, nullptr);
    return status == WEFT_OK ? ffi::Error::Success() : failed();
}

}  // namespace

/* Before the first call: joins the ranks that a launcher has started. Nothing, or what is wrong. */
extern "C" const char *join_ranks() {
    if (ranks != nullptr) return nullptr;
    return weft_communicator_from_env(WEFT_ABI_VERSION, "jax", &ranks) == WEFT_OK ? nullptr : weft_last_error();
}

/* After the last one. */
extern "C" void leave_ranks() {
    weft_communicator_free(ranks);
    ranks = nullptr;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllReduce, all_reduce,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("deadline_ms"));
