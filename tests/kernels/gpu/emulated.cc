// Run `matmul.cu` on a CPU. `emulated.py` compiles this file to a shared library.

#define THREADS_OF_BLOCK (32 * WK)
#include "matmul.cu"

// Convert a pointer to the type of a parameter.
struct Pointer {
    void* address;

    template <typename T>
    operator T*() const { return static_cast<T*>(address); }
};

struct Call {
    void** arrays;  // x, the arrays of each weight, and the results

    void operator()() const {
        constexpr int PER_WEIGHT = ZERO ? 3 : 2;
#define ARRAY(i) Pointer{arrays[i]}
#if ZERO
#define WEIGHT_ARRAYS(i) , ARRAY(3 * i + 1), ARRAY(3 * i + 2), ARRAY(3 * i + 3)
#else
#define WEIGHT_ARRAYS(i) , ARRAY(2 * i + 1), ARRAY(2 * i + 2)
#endif
#define RESULT_ARRAY(i) , ARRAY(PER_WEIGHT * PRODUCTS + 1 + i)
        NAME(ARRAY(0) EACH(WEIGHT_ARRAYS) EACH(RESULT_ARRAY));
    }
};

extern "C" void emulate(void** arrays, int blocks, int batch) {
    run(Call{arrays}, blocks, batch, SHARED_BYTES);
}
