// y = x W^T + bias for numbers of 32 and of 16 bits. W is packed once, in place, in the layout of panels.h.
#include "linear_task.h"
#include "linear_tiles.h"

namespace carousel {

void multiply(const LinearCall& call) {
  int first_panel = 0;
#if defined(CAROUSEL_HAS_TILES)
  if (call.dtype == kBfloat16 && fits_tiles(call.k)) {
    multiply_by_tiles(call);
    if (call.n % kPanel == 0) return;
    first_panel = call.n / kPanel;
  }
#endif
  with_dtype(call.dtype, [&](auto element) {
    multiply_all<ProductOf<decltype(element)>, decltype(element)>(call, first_panel);
  });
}

}  // namespace carousel

CAROUSEL_EXPORT void carousel_linear(const carousel::LinearCall* call) { carousel::multiply(*call); }
