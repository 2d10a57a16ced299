"""Why a behaviour of a reference system is none of jaxkv's."""

TIERS = "memory of the host or of a store elsewhere is no part of jaxkv"
CONNECTOR = "a connector moves pages; jaxkv only knows external tokens"
SHARDS = "one cache a shard; none knows of the others, nor who splits heads"
RUNNER = "about a worker that runs the model"
SCHEDULER = "a scheduler's choice; jaxkv is what it asks"
ENCODER_OUTPUTS = "about a cache of encoder outputs, not of keys and values"
LAYOUT = "about strides in one block of bytes; here every group has its pool"
PLANNING = "derives groups and sizes from a model; here the caller says them"
SERVER = "about the options of a server"
PARTIAL = "pages are found whole; no hit ends inside a page"
CHECKPOINTS = "states are kept where pages end, never inside a chunk"
REPLAY = "no window is computed again over tokens that were found"
LOOKAHEAD = "keys hold no later tokens; with a draft model a page is dropped"
HASHES = "one hash, on the device; its seed is an option and never random"
EMBEDDINGS = "prompts are token ids"
ADAPTER_PATHS = "an adapter is its name; other weights need another one"
EVENT_FIELDS = "events name groups, keys and tokens; no adapter or session"
FOUND_AGAIN = "pages that are found are not announced again"
ALWAYS_COUNTED = "statistics are always kept"
RATES = "a server's moving averages; jaxkv gives the counts"
AGES = "ages are of all pages, in pages published: no samples, no clock"
KINDS = "a kind of layer that is not offered"
OBJECTS = "about the inside of their objects"

REASONS = frozenset(
  value for name, value in list(vars().items()) if name.isupper()
)
