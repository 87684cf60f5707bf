// The one rearrangement behind every packed weight (panels.h).
#include <vector>

#include "panels.h"
#include "simd.h"

// weight [n, words] of 32 bits each, in place; n a multiple of 16.
CAROUSEL_EXPORT void carousel_pack_panels(uint32_t* weight, int64_t n, int64_t words, int32_t num_threads) {
  using carousel::kPanel;
  carousel::parallel_for(num_threads, (int)(n / kPanel), [&](int64_t panel) {
    uint32_t* to = weight + panel * kPanel * words;
    const std::vector<uint32_t> rows(to, to + kPanel * words);
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t u = 0; u < words; ++u) to[u * kPanel + i] = rows[i * words + u];
    }
  });
}
