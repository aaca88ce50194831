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
    b'erviewR\x06models"\xb5\x07\n\rModel'
    b'Overview\x12\x12\n\x04name\x18\x01 \x01(\tR\x04'
    b'name\x12\x18\n\x07version\x18\x02 \x01(\tR\x07v'
    b'ersion\x12\x14\n\x05state\x18\x03 \x01(\tR\x05s'
    b'tate\x12\x16\n\x06reason\x18\x04 \x01(\tR\x06re'
    b'ason\x12\x1a\n\x08platform\x18\x05 \x01(\tR\x08'
    b'platform\x12\x16\n\x06engine\x18\x06 \x01(\t'
    b'R\x06engine\x12\x18\n\x07devices\x18\x07 \x01('
    b'\tR\x07devices\x12!\n\x0cload_secon'
    b'ds\x18\x08 \x01(\x01R\x0bloadSeconds\x12\x1d\n'
    b'\nload_check\x18\x18 \x01(\tR\tloadC'
    b'heck\x12)\n\x10pending_requests'
    b'\x18\t \x01(\x03R\x0fpendingRequests\x12'
    b'*\n\x11last_inference_ms\x18\n \x01'
    b'(\x03R\x0flastInferenceMs\x12#\n\rs'
    b'uccess_count\x18\x0b \x01(\x03R\x0csucc'
    b'essCount\x12\x1d\n\nsuccess_ns\x18\x0c'
    b' \x01(\x03R\tsuccessNs\x12\x19\n\x08queue'
    b'_ns\x18\r \x01(\x03R\x07queueNs\x12#\n\rfa'
    b'ilure_count\x18\x0e \x01(\x03R\x0cfailu'
    b"reCount\x12'\n\x0finference_cou"
    b'nt\x18\x0f \x01(\x03R\x0einferenceCount'
    b"\x12'\n\x0fexecution_count\x18\x10 \x01("
    b'\x03R\x0eexecutionCount\x12&\n\x0fcac'
    b'he_hit_count\x18\x11 \x01(\x03R\rcach'
    b'eHitCount\x12(\n\x10cache_miss_'
    b'count\x18\x12 \x01(\x03R\x0ecacheMissCo'
    b'unt\x12>\n\x07batches\x18\x13 \x03(\x0b2$.r'
    b'ocserve.ModelOverview.Ba'
    b'tchesEntryR\x07batches\x125\n\x0cl'
    b'atencies_us\x18\x14 \x03(\x0b2\x12.rocs'
    b'erve.QuantileR\x0blatencies'
    b'Us\x12.\n\x13worker_memory_byte'
    b's\x18\x15 \x03(\x03R\x11workerMemoryByt'
    b"es\x12'\n\x0fworker_restarts\x18\x16 "
    b'\x01(\x03R\x0eworkerRestarts\x12-\n\x08f'
    b'ailures\x18\x17 \x03(\x0b2\x11.rocserve'
    b'.FailureR\x08failures\x1a:\n\x0cBa'
    b'tchesEntry\x12\x10\n\x03key\x18\x01 \x01(\x03R'
    b'\x03key\x12\x14\n\x05value\x18\x02 \x01(\x03R\x05val'
    b'ue:\x028\x01"<\n\x08Quantile\x12\x1a\n\x08qu'
    b'antile\x18\x01 \x01(\x01R\x08quantile\x12\x14'
    b'\n\x05value\x18\x02 \x01(\x01R\x05value"6\n\x07'
    b'Failure\x12\x17\n\x07time_ms\x18\x01 \x01(\x03'
    b'R\x06timeMs\x12\x12\n\x04text\x18\x02 \x01(\tR\x04'
    b'text"/\n\x17RepositoryEvents'
    b'Request\x12\x14\n\x05after\x18\x01 \x01(\x03R\x05'
    b'after"f\n\x18RepositoryEvent'
    b'sResponse\x121\n\x06events\x18\x01 \x03('
    b'\x0b2\x19.rocserve.RepositoryE'
    b'ventR\x06events\x12\x17\n\x07is_last\x18'
    b'\x02 \x01(\x08R\x06isLast"\x9e\x01\n\x0fReposi'
    b'toryEvent\x12\x16\n\x06number\x18\x01 \x01('
    b'\x03R\x06number\x12\x17\n\x07time_ms\x18\x02 \x01'
    b'(\x03R\x06timeMs\x12\x12\n\x04name\x18\x03 \x01(\t'
    b'R\x04name\x12\x18\n\x07version\x18\x04 \x01(\tR'
    b'\x07version\x12\x14\n\x05state\x18\x05 \x01(\tR'
    b'\x05state\x12\x16\n\x06reason\x18\x06 \x01(\tR\x06'
    b'reason2\xa4\x01\n\x04Page\x12A\n\x08Overv'
    b'iew\x12\x19.rocserve.OverviewR'
    b'equest\x1a\x1a.rocserve.Overvi'
    b'ewResponse\x12Y\n\x10Repository'
    b'Events\x12!.rocserve.Reposi'
    b'toryEventsRequest\x1a".rocs'
    b'erve.RepositoryEventsRes'
    b'ponseb\x06proto3'
)

OverviewRequest = _pool.message_class(DESCRIPTOR, "OverviewRequest")
OverviewResponse = _pool.message_class(DESCRIPTOR, "OverviewResponse")
ModelOverview = _pool.message_class(DESCRIPTOR, "ModelOverview")
Quantile = _pool.message_class(DESCRIPTOR, "Quantile")
Failure = _pool.message_class(DESCRIPTOR, "Failure")
RepositoryEventsRequest = _pool.message_class(DESCRIPTOR, "RepositoryEventsRequest")
RepositoryEventsResponse = _pool.message_class(DESCRIPTOR, "RepositoryEventsResponse")
RepositoryEvent = _pool.message_class(DESCRIPTOR, "RepositoryEvent")
