// The one rearrangement behind every packed weight (panels.h).
#include <vector>

#include "panels.h"
#include "simd.h"

// weight [n, words] of 32 bits each, in place; behind it there is room up to a multiple of 16 rows, which become zeros.
CAROUSEL_EXPORT void carousel_pack_panels(uint32_t* weight, int64_t n, int64_t words, int32_t num_threads) {
  using carousel::kPanel;
  carousel::parallel_for(num_threads, (int)((n + kPanel - 1) / kPanel), [&](int64_t panel) {
    uint32_t* to = weight + panel * kPanel * words;
    std::vector<uint32_t> rows(to, to + std::min<int64_t>(kPanel, n - panel * kPanel) * words);
    rows.resize(kPanel * words);
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t u = 0; u < words; ++u) to[u * kPanel + i] = rows[i * words + u];
    }
  });
}
