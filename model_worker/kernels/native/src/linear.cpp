// y = x W^T + bias of float32 and of bf16. W is packed once, in place, as panels.h has it.
#include "linear_task.h"
#include "linear_tiles.h"

namespace carousel {

void multiply(const LinearCall& call) {
#if defined(CAROUSEL_HAS_TILES)
  if (call.is_bf16 && fits_tiles(call.k)) {
    multiply_by_tiles(call);
    if (call.n % kPanel) multiply_all<Bf16Pairs, bf16>(call, call.n / kPanel);
    return;
  }
#endif
  if (!call.is_bf16) return multiply_all<Floats, float>(call);
#if defined(__AVX512BF16__)
  multiply_all<Bf16Pairs, bf16>(call);
#else
  multiply_all<Widened<bf16>, bf16>(call);
#endif
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_linear(const carousel::LinearCall* call) { carousel::multiply(*call); }
