// Run `matmul.cu` on a CPU. `emulated.py` compiles this file to a shared library.

#define THREADS_OF_BLOCK (32 * WK)
#include "matmul.cu"

struct Call {
    const u16* x;
    const u8* w;
    const Scale* scale;
    const ZeroPoint* zero_point;
    void* out;

    void operator()() const {
#if ZERO
        NAME(x, w, scale, zero_point, out);
#else
        NAME(x, w, scale, out);
#endif
    }
};

extern "C" void emulate(const u16* x, const u8* w, const void* scale, const void* zero_point, void* out,
                        int blocks, int batch) {
    Call call{x, w, static_cast<const Scale*>(scale), static_cast<const ZeroPoint*>(zero_point), out};
    run(call, blocks, batch, SHARED_BYTES);
}
