# distutils: language = c++
# distutils: extra_compile_args = -std=c++17
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Hot loops of tokenization: piece lookup, search for special tokens, and SentencePiece merges.

Strings of a vocabulary live once, in one UTF-8 blob: a Python dict of 262,144 strings would take 40 MB.
"""

from cython.operator cimport dereference
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp
from libcpp.queue cimport priority_queue
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.utility cimport pair
from libcpp.vector cimport vector


cdef class PieceTable:
    """Every piece by id, and by exact text those with ``indexed[id] != 0``.

    pieces: list[str] of V pieces; indexed: uint8[V]. An empty piece is never indexed.
    Raises TypeError on a piece that is no string, ValueError on an indexed text that appears twice.
    """

    cdef string _blob
    cdef vector[uint32_t] _offsets  # [V + 1] into the blob
    cdef vector[int32_t] _slots  # open addressing: id, or -1 for a free slot
    cdef uint32_t _longest  # bytes of the longest indexed piece

    def __init__(self, list pieces not None, const uint8_t[::1] indexed not None):
        cdef Py_ssize_t i, count = len(pieces)
        cdef size_t capacity = 2
        cdef bytes part
        if indexed.shape[0] != count:
            raise ValueError(f"{indexed.shape[0]} flags for {count} pieces")
        self._offsets.reserve(count + 1)
        self._offsets.push_back(0)
        for i in range(count):
            part = (<str?>pieces[i]).encode()
            self._blob.append(<const char *>part, <size_t>len(part))
            if self._blob.size() > 0x7FFFFFFF:
                raise ValueError("the pieces take more than 2 GiB")
            self._offsets.push_back(<uint32_t>self._blob.size())
        self._blob.shrink_to_fit()
        while capacity < 2 * <size_t>count:
            capacity *= 2
        self._slots.assign(capacity, -1)
        for i in range(count):
            if indexed[i] and self._offsets[i + 1] > self._offsets[i]:
                self._index(<int32_t>i)

    cdef int _index(self, int32_t id) except -1:
        cdef uint32_t size = self._offsets[id + 1] - self._offsets[id]
        cdef size_t slot = self._slot(self._blob.data() + self._offsets[id], size)
        if self._slots[slot] >= 0:
            raise ValueError(f"token {self.text(id)!r} has the ids {self._slots[slot]} and {id}")
        self._slots[slot] = id
        if size > self._longest:
            self._longest = size
        return 0

    cdef size_t _slot(self, const char *text, uint32_t size) noexcept nogil:
        """The slot that holds this text, or the free one where it belongs (FNV-1a, linear probing)."""
        cdef const char *blob = self._blob.data()
        cdef uint64_t hash = 14695981039346656037ULL
        cdef size_t mask = self._slots.size() - 1, slot
        cdef uint32_t i
        cdef int32_t id
        for i in range(size):
            hash = (hash ^ <uint8_t>text[i]) * 1099511628211ULL
        slot = (hash ^ (hash >> 32)) & mask
        while True:
            id = self._slots[slot]
            if id < 0 or (
                self._offsets[id + 1] - self._offsets[id] == size
                and memcmp(blob + self._offsets[id], text, size) == 0
            ):
                return slot
            slot = (slot + 1) & mask

    cdef int32_t _find(self, const char *text, uint32_t size) noexcept nogil:
        if size > self._longest:
            return -1
        return self._slots[self._slot(text, size)]

    def __len__(self):
        return self._offsets.size() - 1

    def raw(self, Py_ssize_t id):
        """UTF-8 bytes of the piece with this id; IndexError when there is none."""
        if id < 0 or id + 1 >= <Py_ssize_t>self._offsets.size():
            raise IndexError(f"token id {id} outside 0..{len(self) - 1}")
        return self._blob.data()[self._offsets[id] : self._offsets[id + 1]]

    def text(self, Py_ssize_t id):
        return self.raw(id).decode()

    def find(self, str text not None):
        """Id of the indexed piece with this text, or None."""
        cdef bytes data = text.encode()
        cdef int32_t id = self._find(data, <uint32_t>len(data))
        return None if id < 0 else id

    def merge(self, bytes text not None, const float[::1] scores not None, const int32_t[::1] byte_ids not None,
              int32_t unknown_id):
        """Ids of UTF-8 text by SentencePiece's BPE (arXiv:1808.06226): join the neighbours whose joint piece
        scores best, the leftmost first among equals, until no two make a piece. A heap keeps it O(n log n).

        scores: float32[V]. byte_ids: int32[256], the token of each byte or -1: a character that is no piece
        becomes its bytes' tokens, or ``unknown_id`` when one is missing (-1: no token stands for it).
        """
        cdef Py_ssize_t size = len(text)
        cdef const char *data = text
        cdef vector[int32_t] ids
        if size > 0x7FFFFFFF:
            raise ValueError(f"text of {size} bytes is longer than 2 GiB")
        if scores.shape[0] != len(self) or byte_ids.shape[0] != 256:
            raise ValueError("scores need one entry a piece and byte_ids 256")
        with nogil:
            self._merge(data, <int32_t>size, scores, byte_ids, unknown_id, ids)
        return ids

    cdef void _merge(self, const char *data, int32_t size, const float[::1] scores, const int32_t[::1] byte_ids,
                     int32_t unknown_id, vector[int32_t] &ids) noexcept nogil:
        # Symbols are named by their first byte. Heap entries: (score, (-left, byte length of the joint piece)).
        cdef vector[int32_t] length, previous
        cdef priority_queue[pair[float, pair[int32_t, int32_t]]] heap
        cdef pair[float, pair[int32_t, int32_t]] best
        cdef int32_t at = 0, last = -1, left, right, after, joint
        length.assign(size + 1, 0)
        previous.assign(size + 1, -1)
        while at < size:
            length[at] = min(utf8_length(<uint8_t>data[at]), size - at)
            previous[at] = last
            if last >= 0:
                self._push_pair(data, last, length[last] + length[at], scores, heap)
            last = at
            at += length[at]
        while not heap.empty():
            best = heap.top()
            heap.pop()
            left = -best.second.first
            joint = best.second.second
            right = left + length[left]
            # Symbols only grow: another length means that this pair has gone.
            if length[left] == 0 or right >= size or length[left] + length[right] != joint:
                continue
            length[left] = joint
            length[right] = 0
            after = left + joint
            if after < size:
                previous[after] = left
                self._push_pair(data, left, joint + length[after], scores, heap)
            if previous[left] >= 0:
                self._push_pair(data, previous[left], length[previous[left]] + joint, scores, heap)
        at = 0
        while at < size:
            joint = self._find(data + at, length[at])
            if joint >= 0:
                ids.push_back(joint)
            else:
                push_bytes(data + at, length[at], byte_ids, unknown_id, ids)
            at += length[at]

    cdef void _push_pair(self, const char *data, int32_t left, int32_t size, const float[::1] scores,
                         priority_queue[pair[float, pair[int32_t, int32_t]]] &heap) noexcept nogil:
        cdef int32_t id = self._find(data + left, size)
        if id >= 0:
            heap.push(pair[float, pair[int32_t, int32_t]](scores[id], pair[int32_t, int32_t](-left, size)))


cdef int32_t utf8_length(uint8_t lead) noexcept nogil:
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


cdef void push_bytes(const char *data, int32_t size, const int32_t[::1] byte_ids, int32_t unknown_id,
                     vector[int32_t] &ids) noexcept nogil:
    cdef int32_t i
    for i in range(size):
        if byte_ids[<uint8_t>data[i]] < 0:
            ids.push_back(unknown_id)
            return
    for i in range(size):
        ids.push_back(byte_ids[<uint8_t>data[i]])


cdef class SpecialTokens:
    """Finds the special tokens of a vocabulary in text, the leftmost first and there the longest.

    tokens: (text, id, is_control) each; an empty text is ignored. A token that is not control is user-defined.
    """

    # A trie. A node is a beginning of some token's text; node 0 is the empty one.
    cdef unordered_map[uint64_t, int32_t] _edges  # node << 21 | code point -> node
    cdef vector[int32_t] _ids  # [nodes] the token that ends here, or -1
    cdef vector[char] _ends_control  # [nodes] that token is a control token
    cdef vector[char] _begins_control  # [nodes] some control token begins so

    def __init__(self, tokens):
        cdef int32_t node
        cdef uint64_t edge
        cdef Py_UCS4 c
        self._add_node()
        for text, id, is_control in tokens:
            node = 0
            for c in <str?>text:
                edge = (<uint64_t>node << 21) | <uint64_t>c
                if self._edges.count(edge) == 0:
                    self._edges[edge] = self._add_node()
                node = self._edges[edge]
                self._begins_control[node] |= <bint>is_control
            if node:
                self._ids[node] = id
                self._ends_control[node] = <bint>is_control

    cdef int32_t _add_node(self):
        self._ids.push_back(-1)
        self._ends_control.push_back(0)
        self._begins_control.push_back(0)
        return <int32_t>self._ids.size() - 1

    cdef int32_t _step(self, int32_t node, Py_UCS4 c) noexcept:
        """The node one character on, or -1."""
        it = self._edges.find((<uint64_t>node << 21) | <uint64_t>c)
        return -1 if it == self._edges.end() else dereference(it).second

    def split(self, str text not None, bint control, bint user_defined):
        """Cut text into plain pieces (str, never empty) and token ids (int), looking for the named kinds only."""
        cdef Py_ssize_t start = 0, at = 0, i, end, size = len(text)
        cdef int32_t node, found
        cdef list pieces = []
        while at < size:
            i = end = at
            found = -1
            node = self._step(0, text[at])
            while node > 0:
                i += 1
                if self._ids[node] >= 0 and (control if self._ends_control[node] else user_defined):
                    found = self._ids[node]
                    end = i
                node = self._step(node, text[i]) if i < size else -1
            if found < 0:
                at += 1
                continue
            if start < at:
                pieces.append(text[start:at])
            pieces.append(found)
            at = start = end
        if start < size:
            pieces.append(text[start:])
        return pieces

    def control_starts(self, str text not None):
        """Positions where a control token begins, also one of which only the beginning is left before the end."""
        cdef Py_ssize_t at, i, size = len(text)
        cdef int32_t node
        cdef list positions = []
        for at in range(size):
            i = at
            node = self._step(0, text[at])
            while node > 0 and self._begins_control[node]:
                i += 1
                if i == size or (self._ids[node] >= 0 and self._ends_control[node]):
                    positions.append(at)
                    break
                node = self._step(node, text[i])
        return positions
