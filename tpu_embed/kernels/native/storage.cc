// Stores of rows, for callers that are not C++.
//
// Plain C functions, which `host_native.py` calls through ctypes. The caller checks all sizes.
// A function that may want memory returns 0 if it had it, -1 if not, and the system's error number
// if a file could not grow; the store is then as it was.
#include <cstdint>
#include <new>
#include <system_error>

#include "row_store.h"

namespace tpu_embed {
namespace {

template <typename Run>
int64_t error_of(const Run& run) {
  try {
    run();
  } catch (const std::bad_alloc&) {
    return -1;
  } catch (const std::system_error& error) {
    return error.code().value();
  }
  return 0;
}

// What a store tells of itself.
struct StoreNumbers {
  int64_t size;
  int64_t places;
  int64_t index_bytes;
  int64_t row_bytes;
};

}  // namespace
}  // namespace tpu_embed

// Returns a store, or null; `tpu_embed_storage_delete` ends it.
extern "C" tpu_embed::RowStore* tpu_embed_storage_new(const int64_t* widths, int64_t fields,
                                                      int64_t file) {
  tpu_embed::RowStore* made = nullptr;
  tpu_embed::error_of(
      [&] { made = new tpu_embed::RowStore(widths, fields, static_cast<int>(file)); });
  return made;
}

extern "C" void tpu_embed_storage_delete(tpu_embed::RowStore* store) { delete store; }

extern "C" int64_t tpu_embed_storage_write(tpu_embed::RowStore* store, const uint64_t* ids,
                                           int64_t n, const char* const* fields, const int64_t* at,
                                           int64_t mark) {
  return tpu_embed::error_of(
      [&] { store->write(ids, n, fields, at, static_cast<uint32_t>(mark)); });
}

extern "C" int64_t tpu_embed_storage_read(const tpu_embed::RowStore* store, const uint64_t* ids,
                                          int64_t n, char* const* fields, const int64_t* at,
                                          bool* found) {
  return tpu_embed::error_of([&] { store->read(ids, n, fields, at, found); });
}

extern "C" int64_t tpu_embed_storage_find(const tpu_embed::RowStore* store, const uint64_t* ids,
                                          int64_t n, bool* found) {
  return tpu_embed::error_of([&] { store->find(ids, n, found); });
}

extern "C" int64_t tpu_embed_storage_remove(tpu_embed::RowStore* store, const uint64_t* ids,
                                            int64_t n, int64_t* count) {
  return tpu_embed::error_of([&] { *count = store->remove(ids, n); });
}

// Writes at most `most` ids; returns how many there are.
extern "C" int64_t tpu_embed_storage_list(const tpu_embed::RowStore* store, int64_t mark,
                                          uint64_t* ids, int64_t most) {
  return store->list(static_cast<uint32_t>(mark), ids, most);
}

extern "C" int64_t tpu_embed_storage_compact(tpu_embed::RowStore* store) {
  return tpu_embed::error_of([&] { store->compact(); });
}

extern "C" void tpu_embed_storage_numbers(const tpu_embed::RowStore* store,
                                          tpu_embed::StoreNumbers* numbers) {
  *numbers = {store->size(), store->places(), store->index_bytes(), store->row_bytes()};
}
