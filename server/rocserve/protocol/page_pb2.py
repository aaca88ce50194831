"""Made from page.proto by protos/generate.py; do not edit."""

from rocserve.protocol import pool as _pool

DESCRIPTOR = _pool.add_file(
    b'\n\npage.proto\x12\x08rocserve"\x11'
    b'\n\x0fOverviewRequest"\xa2\x01\n\x10Ov'
    b'erviewResponse\x12\x16\n\x06server'
    b'\x18\x01 \x01(\tR\x06server\x12\x18\n\x07versio'
    b'n\x18\x02 \x01(\tR\x07version\x12\x14\n\x05read'
    b'y\x18\x03 \x01(\x08R\x05ready\x12\x15\n\x06now_ms'
    b'\x18\x04 \x01(\x03R\x05nowMs\x12/\n\x06models\x18'
    b'\x05 \x03(\x0b2\x17.rocserve.ModelOv'
    b'erviewR\x06models"\x96\x07\n\rModel'
    b'Overview\x12\x12\n\x04name\x18\x01 \x01(\tR\x04'
    b'name\x12\x18\n\x07version\x18\x02 \x01(\tR\x07v'
    b'ersion\x12\x14\n\x05state\x18\x03 \x01(\tR\x05s'
    b'tate\x12\x16\n\x06reason\x18\x04 \x01(\tR\x06re'
    b'ason\x12\x1a\n\x08platform\x18\x05 \x01(\tR\x08'
    b'platform\x12\x16\n\x06engine\x18\x06 \x01(\t'
    b'R\x06engine\x12\x18\n\x07devices\x18\x07 \x01('
    b'\tR\x07devices\x12!\n\x0cload_secon'
    b'ds\x18\x08 \x01(\x01R\x0bloadSeconds\x12)\n'
    b'\x10pending_requests\x18\t \x01(\x03R'
    b'\x0fpendingRequests\x12*\n\x11last'
    b'_inference_ms\x18\n \x01(\x03R\x0flas'
    b'tInferenceMs\x12#\n\rsuccess_'
    b'count\x18\x0b \x01(\x03R\x0csuccessCoun'
    b't\x12\x1d\n\nsuccess_ns\x18\x0c \x01(\x03R\ts'
    b'uccessNs\x12\x19\n\x08queue_ns\x18\r \x01'
    b'(\x03R\x07queueNs\x12#\n\rfailure_c'
    b'ount\x18\x0e \x01(\x03R\x0cfailureCount'
    b"\x12'\n\x0finference_count\x18\x0f \x01("
    b"\x03R\x0einferenceCount\x12'\n\x0fexe"
    b'cution_count\x18\x10 \x01(\x03R\x0eexec'
    b'utionCount\x12&\n\x0fcache_hit_'
    b'count\x18\x11 \x01(\x03R\rcacheHitCou'
    b'nt\x12(\n\x10cache_miss_count\x18\x12'
    b' \x01(\x03R\x0ecacheMissCount\x12>\n\x07'
    b'batches\x18\x13 \x03(\x0b2$.rocserve'
    b'.ModelOverview.BatchesEn'
    b'tryR\x07batches\x125\n\x0clatencie'
    b's_us\x18\x14 \x03(\x0b2\x12.rocserve.Qu'
    b'antileR\x0blatenciesUs\x12.\n\x13w'
    b'orker_memory_bytes\x18\x15 \x03(\x03'
    b"R\x11workerMemoryBytes\x12'\n\x0fw"
    b'orker_restarts\x18\x16 \x01(\x03R\x0ewo'
    b'rkerRestarts\x12-\n\x08failures'
    b'\x18\x17 \x03(\x0b2\x11.rocserve.Failur'
    b'eR\x08failures\x1a:\n\x0cBatchesEn'
    b'try\x12\x10\n\x03key\x18\x01 \x01(\x03R\x03key\x12\x14\n'
    b'\x05value\x18\x02 \x01(\x03R\x05value:\x028\x01"'
    b'<\n\x08Quantile\x12\x1a\n\x08quantile\x18'
    b'\x01 \x01(\x01R\x08quantile\x12\x14\n\x05value'
    b'\x18\x02 \x01(\x01R\x05value"6\n\x07Failure'
    b'\x12\x17\n\x07time_ms\x18\x01 \x01(\x03R\x06timeM'
    b's\x12\x12\n\x04text\x18\x02 \x01(\tR\x04text"/\n'
    b'\x17RepositoryEventsRequest'
    b'\x12\x14\n\x05after\x18\x01 \x01(\x03R\x05after"f'
    b'\n\x18RepositoryEventsRespon'
    b'se\x121\n\x06events\x18\x01 \x03(\x0b2\x19.roc'
    b'serve.RepositoryEventR\x06e'
    b'vents\x12\x17\n\x07is_last\x18\x02 \x01(\x08R\x06'
    b'isLast"\x9e\x01\n\x0fRepositoryEve'
    b'nt\x12\x16\n\x06number\x18\x01 \x01(\x03R\x06numb'
    b'er\x12\x17\n\x07time_ms\x18\x02 \x01(\x03R\x06tim'
    b'eMs\x12\x12\n\x04name\x18\x03 \x01(\tR\x04name\x12'
    b'\x18\n\x07version\x18\x04 \x01(\tR\x07versio'
    b'n\x12\x14\n\x05state\x18\x05 \x01(\tR\x05state\x12'
    b'\x16\n\x06reason\x18\x06 \x01(\tR\x06reason2'
    b'\xa4\x01\n\x04Page\x12A\n\x08Overview\x12\x19.r'
    b'ocserve.OverviewRequest\x1a'
    b'\x1a.rocserve.OverviewRespo'
    b'nse\x12Y\n\x10RepositoryEvents\x12'
    b'!.rocserve.RepositoryEve'
    b'ntsRequest\x1a".rocserve.Re'
    b'positoryEventsResponseb\x06'
    b'proto3'
)

OverviewRequest = _pool.message_class(DESCRIPTOR, "OverviewRequest")
OverviewResponse = _pool.message_class(DESCRIPTOR, "OverviewResponse")
ModelOverview = _pool.message_class(DESCRIPTOR, "ModelOverview")
Quantile = _pool.message_class(DESCRIPTOR, "Quantile")
Failure = _pool.message_class(DESCRIPTOR, "Failure")
RepositoryEventsRequest = _pool.message_class(DESCRIPTOR, "RepositoryEventsRequest")
RepositoryEventsResponse = _pool.message_class(DESCRIPTOR, "RepositoryEventsResponse")
RepositoryEvent = _pool.message_class(DESCRIPTOR, "RepositoryEvent")
