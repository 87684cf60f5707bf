// Packs the weights of linear layers.
#include <vector>

#include "panels.h"
#include "simd.h"

namespace carousel {

template <class Word>
void pack_panels(Word* weight, int64_t n, int64_t words, int num_threads) {
  parallel_for(num_threads, (int)((n + kPanel - 1) / kPanel), [&](int64_t panel) {
    Word* to = weight + panel * kPanel * words;
    std::vector<Word> rows(to, to + std::min<int64_t>(kPanel, n - panel * kPanel) * words);
    rows.resize(kPanel * words);
    for (int64_t i = 0; i < kPanel; ++i) {
      for (int64_t u = 0; u < words; ++u) to[u * kPanel + i] = rows[i * words + u];
    }
  });
}

}  // namespace carousel

// Packs weight [n, row_bytes], of words of 2 or 4 bytes, in place. It is followed by room up to a multiple of 16 rows,
// which become zeros.
CAROUSEL_EXPORT void carousel_pack_panels(void* weight, int64_t n, int64_t row_bytes, int32_t word_bytes,
                                          int32_t num_threads) {
  using namespace carousel;
  if (word_bytes == 2) return pack_panels((uint16_t*)weight, n, row_bytes / 2, num_threads);
  pack_panels((uint32_t*)weight, n, row_bytes / 4, num_threads);
}
